"""transformers models with their self-attention over a sharded latent cache (tested with transformers 5.17 to 5.23).

transformers loads the model and cuts MLPs and experts (skeleton.py). Self-attention is left out of that: each MLA
module is replaced by a `MLAAttention` that reads its own slices of the checkpoint. Tokens go through the model flat,
[1, T].
"""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from torch import Tensor, nn
from transformers.utils import is_kernels_available

from dcpmla.attention.compressed.layer import CompressedAttention
from dcpmla.attention.compressed.step import with_angles
from dcpmla.attention.layer import MLAAttention
from dcpmla.attention.rope import query_factor
from dcpmla.attention.scales import missing_scales
from dcpmla.attention.step import SelectedTokens, StepMetadata
from dcpmla.cache.compressed import AnyCache, AnyPlan, plan_compressed
from dcpmla.cache.latent import LatentCache
from dcpmla.comm.exchange import Exchange
from dcpmla.comm.select import ChosenExchange
from dcpmla.compressed_config import CompressedConfig
from dcpmla.config import DCPConfig, MLAConfig
from dcpmla.hf_config import COMPRESSED_MODEL_TYPES, check_model_type, read_attention, skips_topk
from dcpmla.hf_quantization import scale_block
from dcpmla.integrations.checkpoint import Checkpoint
from dcpmla.integrations.checkpoint_names import module_name
from dcpmla.integrations.config_checks import check_config, check_generation_config, check_raw_config, reason
from dcpmla.integrations.experts import experts_of
from dcpmla.integrations.skeleton import Placeholder, load_skeleton
from dcpmla.integrations.static_experts import static_experts
from dcpmla.parallel.mesh import DCPMesh

_logger = logging.getLogger(__name__)
# transformers' classes for each architecture (MODEL_TYPES); Kimi-K2's checkpoints are DeepSeek-V3's under another
# name.
_CLASS_PREFIXES = {
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "kimi_k2": "DeepseekV3",
    "glm4_moe_lite": "Glm4MoeLite",
    "longcat_flash": "LongcatFlash",
    "mistral4": "Mistral4",
    "deepseek_v32": "DeepseekV32",
    "glm_moe_dsa": "GlmMoeDsa",
    "deepseek_v4": "DeepseekV4",
}
_ALL_ROWS = 0  # transformers' logits_to_keep for logits of every token
_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]  # no code, no pickles


class ShardedModel:
    """A causal language model whose attention runs under TP x DCP.

    Attributes:
        attention_config: of every layer.
        num_attention_layers: caches that a step needs (two a decoder layer in LongCat).
        index_layers: those of them that have an index cache: the layers of sparse MLA that select by themselves.
        eos_token_ids, vocab_size, dtype, device: of the model.
    """

    def __init__(
        self,
        model: Any,
        attention_config: MLAConfig | CompressedConfig,
        num_attention_layers: int,
        index_layers: Sequence[int],
        exchange: Exchange,
        device: torch.device,
    ) -> None:
        self._model, self._exchange = model, exchange
        self.attention_config, self.num_attention_layers = attention_config, num_attention_layers
        self.index_layers = tuple(index_layers)
        self.eos_token_ids = _eos_token_ids(model)
        self.vocab_size: int = model.config.vocab_size
        self.dtype: torch.dtype = model.dtype
        self.device = device
        # A 4-dim mask counts as made by the caller: it keeps transformers from building a [T, T] one that nothing
        # reads.
        self._no_mask = torch.empty(1, 1, 0, 0, device=device)
        self._experts = list(experts_of(model))

    def plan_cache(self, dcp: DCPConfig, seq_lens: list[int], num_states: int) -> AnyPlan:
        """Return the sizes of a cache for sequences of the given final lengths at once.

        Args:
            num_states: of requests, where the model's caches have states.
        """
        config = self.attention_config
        if isinstance(config, CompressedConfig):
            return plan_compressed(config, dcp, seq_lens, self.dtype, num_states)
        return LatentCache.plan(config, dcp, self.num_attention_layers, seq_lens, self.dtype, self.index_layers)

    @torch.inference_mode()
    def step(self, token_ids: Tensor, metadata: StepMetadata, cache: AnyCache, logits_at: Tensor) -> Tensor:
        """Run one step of a flat batch. Collective over the TP group.

        Args:
            token_ids: [T] int64, T = metadata.num_tokens.
            cache: written at the step's slots and read.
            logits_at: [n] int64, rows of the batch whose next-token logits are wanted.
        Returns:
            [n, vocab] float32, the same on every rank.
        """
        return self._forward(token_ids, metadata.positions, metadata, cache, logits_at)

    @torch.inference_mode()
    def decode(self, token_ids: Tensor, metadata: StepMetadata, cache: AnyCache) -> Tensor:
        """Run one step for a `DecodeGraph`: all rows' logits, and no look at results from the host. Collective over the
        TP group.

        Args:
            token_ids: [T] int64, one of each request.
        Returns:
            [T, vocab] float32, the same on every rank.
        """
        with static_experts(self._experts):
            return self._forward(token_ids, metadata.positions, metadata, cache, _ALL_ROWS)

    def check(self) -> None:
        """Raise what the exchange found in steps whose results have come to the host (`Exchange.check`)."""
        self._exchange.check()

    @torch.inference_mode()
    def profile(self, num_tokens: int, num_logits: int = 1) -> None:
        """Run dummy tokens without a cache, so that the allocator's peak shows what the largest step needs.
        Collective over the TP group.

        Every token is the same one, so all go to the same experts: no step of that many tokens loads an expert more.
        Attention claims its memory and computes nothing (`MLAAttention.claim_memory`).

        Args:
            num_logits: rows whose logits a step may want, one for each request.
        """
        token_ids = torch.zeros(num_tokens, dtype=torch.int64, device=self.device)
        positions, indexer = torch.arange(num_tokens, device=self.device), self.attention_config.indexer
        selection = None if indexer is None else SelectedTokens.empty(num_tokens, indexer.topk, self.device)
        self._forward(token_ids, positions, None, None, torch.zeros(num_logits, dtype=torch.int64, device=self.device))
        del selection  # a step's own, held during the whole pass

    def _forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        metadata: StepMetadata | None,
        cache: AnyCache | None,
        logits_at: Tensor | int,
    ) -> Tensor:
        if metadata is not None:
            metadata = self._prepare(metadata)
        logits = self._model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            attention_mask=self._no_mask,
            use_cache=False,
            logits_to_keep=logits_at,
            step=metadata,
            latent_cache=cache,
        ).logits
        return logits[0].float()

    def _prepare(self, metadata: StepMetadata) -> StepMetadata:
        """Return a step with what all layers share."""
        config = self.attention_config
        if isinstance(config, CompressedConfig):
            return with_angles(metadata, self._cos_sin_of_layers)
        factor = query_factor(metadata.positions, config.llama_4_scaling, self.dtype)
        metadata = metadata.with_positions(self._cos_sin(metadata.positions), factor)
        return metadata if config.indexer is None else metadata.with_selection(config.indexer.topk)

    def _cos_sin_of_layers(self, positions: Tensor, is_compressed: bool) -> Tensor:
        """Return `_cos_sin` for one of the two kinds of layers of DeepSeek-V4."""
        return self._cos_sin(positions, layer_type="compress" if is_compressed else "main")

    def _cos_sin(self, positions: Tensor, **how: str) -> Tensor:
        """Return the angles [T, R] float32 of `apply_rope` at positions [T], by the model's own rotary embedding (YaRN
        and all other kinds).
        """
        like = torch.empty(0, dtype=torch.float32, device=self.device)
        rotary: Any = self._model.model.rotary_emb(like, positions[None], **how)
        if isinstance(rotary, Tensor):  # DeepSeek-V2 rotates complex numbers
            return torch.cat([rotary[0].real, rotary[0].imag], -1)
        # Each angle once: most models repeat them for the second half.
        half = self.attention_config.rope_dim // 2
        return torch.cat([part[0, :, :half] for part in rotary], -1)


class _ShardedSelfAttention(nn.Module):
    """A layer of this package's attention in the shape of the call that transformers' decoder layers make.

    Args:
        layer: its number in a `LatentCache`.
        num_results: that the decoder layer takes: GLM-5's hand a selection on from layer to layer; here the step has
            it.
    """

    def __init__(self, attention: MLAAttention | CompressedAttention, layer: int, num_results: int) -> None:
        super().__init__()
        self.attention, self.layer, self.num_results = attention, layer, num_results

    def forward(
        self, hidden_states: Tensor, *, step: StepMetadata | None, latent_cache: AnyCache | None, **_: object
    ) -> tuple[Tensor | None, ...]:
        if step is None or latent_cache is None:  # a profile
            self.attention.claim_memory(hidden_states.shape[1])
            out = torch.zeros_like(hidden_states)
        else:
            cache: Any = latent_cache[self.layer]  # as the layer's kind of attention takes it
            out = self.attention(hidden_states[0], cache, step)[None]
        return out, *(None,) * (self.num_results - 1)


def find_model(model: str) -> Path:
    """Return a directory as it is, or a hub id downloaded to the local cache (safetensors and JSON only).

    Raises:
        ValueError: neither.
    """
    try:
        if Path(model).is_dir():
            return Path(model)
        return Path(snapshot_download(model, allow_patterns=_FILES))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"model (--model) is {model!r}: no such directory, and no such model could be downloaded"
        ) from error


def load_config(directory: Path) -> Any:
    """Return a model's transformers config, from its directory or from the config file itself.

    Raises:
        ValueError: no config.json, an architecture that is not MLA, or a field that no such model can have.
    """
    file = directory if directory.is_file() else directory / "config.json"
    try:
        raw = dict(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"model (--model): {directory} has no readable config.json") from error
    model_type = raw.pop("model_type", "none")
    check_model_type(model_type)
    try:
        check_raw_config(raw)
        quantization = raw.get("quantization_config")
        if quantization and quantization.get("quant_method") == "fp8" and not is_kernels_available():
            # transformers takes its fp8 matrix products from the package `kernels`; without it MLPs are dequantized
            # like attention.
            quantization["dequantize"] = True
        config = getattr(transformers, f"{_CLASS_PREFIXES[model_type]}Config").from_dict(raw)
        check_config(config)
    except Exception as error:  # transformers checks fields with exceptions of many kinds
        raise ValueError(f"model (--model): {file} is no {model_type} config: {reason(error)}") from error
    return config


def load_model(
    directory: Path,
    config: Any,
    dcp: DCPConfig,
    mesh: DCPMesh,
    selection: ChosenExchange,
    dtype: torch.dtype | None,
    device: torch.device,
    enable_expert_parallel: bool = False,
) -> ShardedModel:
    """Load a checkpoint, every rank its own part. Collective over the job, whose ranks must be the TP group.

    Args:
        config: from `load_config`.
        dtype: to compute in; None takes the checkpoint's.
        enable_expert_parallel: each rank holds its share of the experts whole, instead of a slice of every one.
    Raises:
        ValueError: sizes that do not divide, tensors that are missing or of another shape, a broken generation config.
    """
    check_generation_config(directory)
    attention_config = read_attention(config)
    attention_config.heads_per_rank(mesh.tp_size)
    rename = module_name if config.model_type in COMPRESSED_MODEL_TYPES else str
    checkpoint = Checkpoint(directory, scale_block(getattr(config, "quantization_config", None)), rename)
    model = load_skeleton(directory, checkpoint, config, mesh, dtype, device, enable_expert_parallel)
    _check_norms(model)
    placeholders = [name for name, module in model.named_modules() if isinstance(module, Placeholder)]
    missing: set[str] = set()
    index_layers = []
    for layer, name in enumerate(placeholders):
        weights = checkpoint.weights(f"{name}.")
        missing |= missing_scales(weights, dcp)
        attention: MLAAttention | CompressedAttention
        where = dcp, mesh, selection.exchange, model.dtype, device
        if isinstance(attention_config, CompressedConfig):
            attention = CompressedAttention(attention_config, attention_config.layer_kinds[layer], *where)
        else:
            attention = MLAAttention(attention_config, *where, skips_topk(config, layer))
        try:
            attention.load_weights(weights)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        if isinstance(attention, MLAAttention) and attention.indexer is not None:
            index_layers.append(layer)
        num_results = 3 if config.model_type == "glm_moe_dsa" else 2
        model.set_submodule(name, _ShardedSelfAttention(attention.eval(), layer, num_results))
    if missing and mesh.tp_rank == 0:
        _logger.warning(
            "the checkpoint has no %s, so 1 is taken: e4m3 saturates at 448 and loses what is smaller than 0.001 "
            "(--kv-cache-scale gives a kv_scale, --calculate-kv-scales finds both)",
            " and no ".join(sorted(missing)),
        )
    return ShardedModel(model, attention_config, len(placeholders), index_layers, selection.exchange, device)


def _check_norms(model: Any) -> None:
    """Raise ValueError where transformers' norms give another dtype than the model's matrices take (DeepSeek-V4's did,
    in bfloat16, in transformers 5.17).
    """
    like = torch.zeros(1, model.config.hidden_size, dtype=model.dtype, device=model.device)
    found = model.model.norm(like).dtype
    if found != model.dtype:
        raise ValueError(
            f"dtype (--dtype) is {model.dtype}, but the norms of transformers {transformers.__version__} give {found} "
            f"in this model; install transformers 5.23, or choose float32"
        )


def _eos_token_ids(model: Any) -> frozenset[int]:
    """Return the end-of-sequence tokens of the generation config, else of the model's config."""
    generation = getattr(model, "generation_config", None)
    eos: int | Sequence[int] | None = getattr(generation, "eos_token_id", None)
    eos = model.config.eos_token_id if eos is None else eos
    return frozenset([eos] if isinstance(eos, int) else eos or [])
