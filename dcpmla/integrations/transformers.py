"""transformers models with their self-attention over a sharded latent cache (tested with transformers 5.17 to 5.23).

transformers loads the model and cuts MLPs and experts by its own tensor-parallel plan. Self-attention is left out of that: each MLA module
is replaced by a `MLAAttention` that reads its own slices of the checkpoint. Tokens go through the model flat, [1, T].
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from torch import Tensor, nn
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import is_kernels_available

from dcpmla.attention.layer import MLAAttention
from dcpmla.attention.metadata import StepMetadata
from dcpmla.cache.latent import LatentCache
from dcpmla.comm.select import Selection
from dcpmla.config import DCPConfig, MLAConfig, check_model_type
from dcpmla.integrations.checkpoint import Checkpoint
from dcpmla.parallel.mesh import DCPMesh

# transformers' classes for each architecture (MLA_MODEL_TYPES); Kimi-K2's checkpoints are DeepSeek-V3's under another name.
_CLASS_PREFIXES = {
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "kimi_k2": "DeepseekV3",
    "glm4_moe_lite": "Glm4MoeLite",
    "longcat_flash": "LongcatFlash",
    "mistral4": "Mistral4",
}
_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]  # no code, no pickles


class ShardedModel:
    """A causal language model whose attention runs under TP x DCP.

    Attributes:
        attention_config: of every layer.
        num_attention_layers: caches that a step needs (two a decoder layer in LongCat).
        eos_token_ids, dtype, device: of the model.
    """

    def __init__(self, model: Any, attention_config: MLAConfig, num_attention_layers: int, device: torch.device) -> None:
        self._model = model
        self.attention_config, self.num_attention_layers = attention_config, num_attention_layers
        self.eos_token_ids = _eos_token_ids(model)
        self.dtype: torch.dtype = model.dtype
        self.device = device
        # A 4-dim mask counts as made by the caller: it keeps transformers from building a [T, T] one that nothing reads.
        self._no_mask = torch.empty(1, 1, 0, 0, device=device)

    @torch.inference_mode()
    def step(self, token_ids: Tensor, metadata: StepMetadata, cache: LatentCache, logits_at: Tensor) -> Tensor:
        """Run one step of a flat batch. Collective over the TP group.

        Args:
            token_ids: [T] int64, T = metadata.num_tokens.
            cache: written at the step's slots and read.
            logits_at: [n] int64, rows of the batch whose next-token logits are wanted.
        Returns:
            [n, vocab] float32, the same on every rank.
        """
        positions = metadata.positions[None]
        logits = self._model(
            input_ids=token_ids[None],
            position_ids=positions,
            attention_mask=self._no_mask,
            use_cache=False,
            logits_to_keep=logits_at,
            metadata=metadata,
            latent_cache=cache,
            cos_sin=self._cos_sin(positions),
        ).logits
        return logits[0].float()

    def _cos_sin(self, positions: Tensor) -> Tensor:
        """[1, T] positions -> [T, R] float32 rows of `apply_rope`, by the model's own rotary embedding (YaRN and all other kinds)."""
        rotary = self._model.model.rotary_emb(torch.empty(0, dtype=torch.float32, device=self.device), positions)
        if isinstance(rotary, Tensor):  # DeepSeek-V2 rotates complex numbers
            return torch.cat([rotary[0].real, rotary[0].imag], -1)
        return torch.cat([part[0, :, : part.shape[-1] // 2] for part in rotary], -1)


class _ShardedSelfAttention(nn.Module):
    """`MLAAttention` behind the call that transformers' decoder layers make."""

    def __init__(self, attention: MLAAttention, layer: int) -> None:
        super().__init__()
        self.attention, self.layer = attention, layer

    def forward(
        self, hidden_states: Tensor, *, metadata: StepMetadata | None, latent_cache: LatentCache, cos_sin: Tensor, **_: object
    ) -> tuple[Tensor, None]:
        return self.attention(hidden_states[0], latent_cache[self.layer], metadata, cos_sin)[None], None


def find_model(model: str) -> Path:
    """A directory as it is, or a hub id downloaded to the local cache (safetensors and JSON only).

    Raises:
        ValueError: neither.
    """
    try:
        if Path(model).is_dir():
            return Path(model)
        return Path(snapshot_download(model, allow_patterns=_FILES))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(f"model (--model) is {model!r}: no such directory, and no such model could be downloaded") from error


def load_config(directory: Path) -> Any:
    """A model's transformers config.

    Raises:
        ValueError: no config.json, or an architecture that is not dense MLA.
    """
    try:
        raw = dict(json.loads((directory / "config.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"model (--model): {directory} has no readable config.json") from error
    model_type = raw.pop("model_type", "none")
    check_model_type(model_type)
    quantization = raw.get("quantization_config")
    if quantization and quantization.get("quant_method") == "fp8" and not is_kernels_available():
        # transformers takes its fp8 matrix products from the package `kernels`; without it MLPs are dequantised like attention.
        quantization["dequantize"] = True
    try:
        return getattr(transformers, f"{_CLASS_PREFIXES[model_type]}Config").from_dict(raw)
    except Exception as error:  # transformers checks fields with exceptions of many kinds
        raise ValueError(f"model (--model): {directory}/config.json is no {model_type} config: {error!r}") from error


def load_model(
    directory: Path, config: Any, dcp: DCPConfig, mesh: DCPMesh, selection: Selection, dtype: torch.dtype | None, device: torch.device
) -> ShardedModel:
    """Load a checkpoint, every rank its own part. Collective over the job, whose ranks must be the TP group.

    Args:
        config: from `load_config`.
        dtype: to compute in; None takes the checkpoint's.
    Raises:
        ValueError: sizes that do not divide, tensors that are missing or misshaped.
    """
    attention_config = MLAConfig.from_hf(config)
    attention_config.heads_per_rank(mesh.tp_size)
    quantization = getattr(config, "quantization_config", None) or {}
    block_size = quantization.get("weight_block_size") or (128, 128)
    checkpoint = Checkpoint(directory, (block_size[0], block_size[1]))
    model = _load_without_attention(directory, config, mesh.tp_size, dtype, device)
    placeholders = [name for name, module in model.named_modules() if isinstance(module, _Placeholder)]
    for layer, name in enumerate(placeholders):
        attention = MLAAttention(attention_config, dcp, mesh, selection.exchange, model.dtype, device)
        try:
            attention.load_weights(checkpoint.weights(f"{name}."))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        model.set_submodule(name, _ShardedSelfAttention(attention.eval(), layer))
    return ShardedModel(model, attention_config, len(placeholders), device)


class _Placeholder(nn.Module):
    """Stands where an MLA module was, so that transformers neither allocates nor loads it."""


def _load_without_attention(directory: Path, config: Any, tp_size: int, dtype: torch.dtype | None, device: torch.device) -> Any:
    """transformers' model, its MLPs and experts cut over TP, with a `_Placeholder` for every MLA module."""
    base: Any = getattr(transformers, f"{_CLASS_PREFIXES[config.model_type]}ForCausalLM")

    class Skeleton(base):
        _tp_plan: dict[str, str]
        _keys_to_ignore_on_load_unexpected = [*(base._keys_to_ignore_on_load_unexpected or []), r"\.self_attn\."]

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for name, module in list(self.named_modules()):
                if hasattr(module, "kv_a_proj_with_mqa"):
                    self.set_submodule(name, _Placeholder())
                elif name.endswith(".experts"):
                    _check_experts(module, tp_size)
            self._tp_plan = {rule: style for rule, style in self._tp_plan.items() if ".self_attn." not in rule}

    Skeleton.__name__ = base.__name__  # transformers' own reports name the class
    # transformers places a cut model itself: on the accelerator of LOCAL_RANK, or on the CPU where there is none.
    placement = {"distributed_config": DistributedConfig(tp_size=tp_size)} if tp_size > 1 else {"device_map": str(device)}
    try:
        model, info = Skeleton.from_pretrained(
            str(directory),
            config=config,
            dtype=dtype or "auto",
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **placement,
        )
    except OSError as error:
        raise ValueError(f"model (--model): {directory} has no safetensors checkpoint that transformers can load ({error})") from error
    _check_loaded(info)
    return model.eval()


def _check_experts(experts: Any, tp_size: int) -> None:
    """transformers cuts linear layers unevenly where it must, but not experts."""
    if experts.down_proj.shape[-1] % tp_size:
        raise ValueError(
            f"tensor_parallel_size (-tp) is {tp_size}; it must divide the experts' intermediate size {experts.down_proj.shape[-1]}"
        )


def _check_loaded(info: dict[str, Any]) -> None:
    """transformers fills what a checkpoint lacks with random numbers; here that is an error."""
    if info["missing_keys"]:
        raise ValueError(f"checkpoint: {len(info['missing_keys'])} tensors are missing, the first is {min(info['missing_keys'])}")
    if info["mismatched_keys"]:
        name, found, expected = min(info["mismatched_keys"])
        raise ValueError(f"checkpoint: tensor {name} has shape {tuple(found)}; the model's config asks for {tuple(expected)}")


def _eos_token_ids(model: Any) -> frozenset[int]:
    """The generation config's, else the model config's."""
    generation = getattr(model, "generation_config", None)
    eos: int | Sequence[int] | None = getattr(generation, "eos_token_id", None)
    eos = model.config.eos_token_id if eos is None else eos
    return frozenset([eos] if isinstance(eos, int) else eos or [])
