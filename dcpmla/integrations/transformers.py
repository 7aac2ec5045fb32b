"""From a transformers config and a checkpoint to a sharded model (launch/tested_versions.txt: versions that passed).

transformers gives configs, shapes and rotary embeddings (skeleton.py); whatever has matrices is computed by this
package, and reads its own slices of the checkpoint (parts.py). Decoder layers of norm, attention, norm and MLP run as
`Decoder`, LongCat's, which have these twice, too, DeepSeek-V4's as `StreamDecoder`; tokens go flat, [T].
"""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from tqdm import tqdm

from dcpmla.attention.kind import AttentionKind, AttentionLayer
from dcpmla.attention.scales import missing_scales
from dcpmla.comm.reduce import Reduce, select_reduce
from dcpmla.comm.select import ChosenExchange
from dcpmla.config import DCPConfig
from dcpmla.hf_quantization import has_fp4_experts, is_int4, scale_block
from dcpmla.integrations.checkpoint import Checkpoint
from dcpmla.integrations.checkpoint_names import module_name, text_module_name
from dcpmla.integrations.config_checks import check_generation_config
from dcpmla.integrations.dummy import dummy_weights
from dcpmla.integrations.hf_config import COMPRESSED_MODEL_TYPES, attention_kind
from dcpmla.integrations.mtp import MtpNames, check_mtp_weights, load_mtp, with_mtp_layer
from dcpmla.integrations.parts import Parts
from dcpmla.integrations.sharded_model import ShardedModel
from dcpmla.integrations.skeleton import (
    build_skeleton,
    check_shapes,
    part_of,
    published_shapes,
)
from dcpmla.integrations.streams import load_stream_mtp, load_streams
from dcpmla.model.block import Decoder, DecoderBlock, ShortcutBlock
from dcpmla.model.moe import MoE
from dcpmla.model.mtp import MtpLayer
from dcpmla.model.stream_decoder import StreamDecoder, StreamMtpLayer
from dcpmla.model.streams import Connection
from dcpmla.parallel.linear import Weight
from dcpmla.parallel.mesh import DCPMesh

_logger = logging.getLogger(__name__)


def _in_range(dtype: torch.dtype) -> torch.dtype:
    """Return a checkpoint's dtype, but bfloat16 for float16: sums of many models exceed its range, 65,504."""
    return torch.bfloat16 if dtype == torch.float16 else dtype


def load_model(
    directory: Path,
    config: Any,
    dcp: DCPConfig,
    mesh: DCPMesh,
    selection: ChosenExchange,
    dtype: torch.dtype | None,
    device: torch.device,
    enable_expert_parallel: bool = False,
    load_format: str = "auto",
    expert_dtype: str = "auto",
    with_mtp: bool = False,
) -> ShardedModel:
    """Load a checkpoint, every rank its own part. Collective over the job, whose ranks must be the TP group.

    Args:
        config: Config from `load_config`.
        dtype: Dtype of computation; None takes the checkpoint's, but bfloat16 for float16.
        enable_expert_parallel: each rank holds its share of the experts whole, instead of a slice of every one.
        load_format: "auto" reads the checkpoint, "dummy" needs none and draws random weights.
        expert_dtype: "auto" leaves experts as they are stored, "fp8" re-encodes those in 4 bits without a rounding.
        with_mtp: load the MTP module, too (`check_mtp`).
    Raises:
        ValueError: sizes that do not divide, tensors that are missing or of another shape, a broken generation config.
    """
    check_generation_config(directory)
    mtp_names, num_layers = MtpNames.of(config), config.num_hidden_layers
    is_compressed = config.model_type in COMPRESSED_MODEL_TYPES
    if with_mtp:
        config = with_mtp_layer(config)
    # LongCat's decoder layers have two layers of attention each, its module one.
    attention = attention_kind(config, int(with_mtp and config.model_type == "longcat_flash"))
    attention.check_layout(dcp)
    model = build_skeleton(config)
    mtp_shapes = mtp_names.shapes(config, published_shapes(model)) if with_mtp else {}
    quantization = getattr(config, "quantization_config", None)
    if load_format == "dummy":
        dtype = dtype or _in_range(config.dtype or torch.bfloat16)
        expert_codes = "int4" if is_int4(quantization) else "fp4" if has_fp4_experts(config) else None
        is_fp8 = quantization is not None and not is_int4(quantization)
        weights = dummy_weights(published_shapes(model) | mtp_shapes, is_fp8, expert_codes, dtype, device)
    else:
        rename = partial(module_name, num_layers=num_layers) if is_compressed else text_module_name
        parts_used = {part_of(name) for name in [*published_shapes(model), *mtp_shapes]}
        checkpoint = Checkpoint(directory, scale_block(quantization), rename, lambda name: part_of(name) in parts_used)
        if with_mtp:
            check_mtp_weights(checkpoint.names, mtp_shapes)
            checkpoint.check_shapes(mtp_shapes)
        check_shapes(model, checkpoint)
        dtype = dtype or _in_range(config.dtype or checkpoint.dtype)
        weights = checkpoint.weights("")
    if enable_expert_parallel and not any(hasattr(module, "experts") for module in model.modules()):
        raise ValueError(
            "enable_expert_parallel (--enable-expert-parallel): the model has no experts; leave the option out"
        )
    parts = Parts(model, weights, mesh, dtype, device, enable_expert_parallel and mesh.tp_size > 1, expert_dtype)
    layers = _AttentionLayers(attention, dcp, mesh, selection, weights, dtype, device)
    reduce = select_reduce(mesh.tp_group, device, dcp.exchange_timeout)
    hidden_states: Decoder | StreamDecoder
    to_head: Connection | None = None
    mtp: MtpLayer | StreamMtpLayer | None = None
    num_blocks = len(model.model.layers) - (config.num_hidden_layers - num_layers)
    names = [f"model.layers.{number}" for number in range(num_blocks)]
    if is_compressed:
        hidden_states, to_head = load_streams(_progress(names, mesh), parts, layers.load, reduce)
    else:
        hidden_states = _load_decoder(names, parts, layers.load, reduce)
    if with_mtp:
        load_module = load_stream_mtp if is_compressed else load_mtp
        mtp = load_module(parts, mtp_names, hidden_states.embedding, layers.load, reduce)
    head = parts.head()
    layers.warn_of_missing_scales()
    return ShardedModel(
        hidden_states.eval(),
        head,
        model.model.rotary_emb.to(device),
        attention,
        selection.exchange,
        reduce,
        _eos_token_ids(directory, config),
        dtype,
        device,
        to_head,
        mtp,
    )


LoadAttention = Callable[[str], tuple[AttentionLayer, int]]


def _load_decoder(names: list[str], parts: Parts, load_attention: LoadAttention, reduce: Reduce) -> Decoder:
    """Load the layers of these names."""
    config = parts.model.config
    is_shortcut = config.model_type == "longcat_flash"
    first = "input_layernorm.0.weight" if is_shortcut else "input_layernorm.weight"
    norms = [parts.vector(f"{name}.{first}") for name in names] + [parts.vector("model.norm.weight")]
    load_block = _load_shortcut_block if is_shortcut else _load_block
    blocks = [
        load_block(name, output_norm, parts, load_attention, reduce)
        for name, output_norm in zip(_progress(names, parts.mesh), norms[1:], strict=True)
    ]
    return Decoder(parts.vector("model.embed_tokens.weight"), norms[0], blocks, config.rms_norm_eps)


def _load_block(
    name: str, output_norm: Tensor, parts: Parts, load_attention: LoadAttention, reduce: Reduce
) -> DecoderBlock:
    attention, layer = load_attention(f"{name}.self_attn")
    norms = parts.vector(f"{name}.post_attention_layernorm.weight"), output_norm
    mlp, eps = parts.mlp(f"{name}.mlp"), parts.model.config.rms_norm_eps
    has_norm = hasattr(parts.model.get_submodule(f"{name}.mlp"), "post_mlp_layernorm")
    mlp_norm = parts.vector(f"{name}.mlp.post_mlp_layernorm.weight") if has_norm else None
    return DecoderBlock(layer, attention, mlp, *norms, eps, reduce, mlp_norm)


def _load_shortcut_block(
    name: str, output_norm: Tensor, parts: Parts, load_attention: LoadAttention, reduce: Reduce
) -> ShortcutBlock:
    (first, layer), (second, _) = (load_attention(f"{name}.self_attn.{number}") for number in range(2))
    experts = parts.mlp(f"{name}.mlp")
    assert isinstance(experts, MoE)
    inner = ("post_attention_layernorm.0", "input_layernorm.1", "post_attention_layernorm.1")
    norms = [*(parts.vector(f"{name}.{norm}.weight") for norm in inner), output_norm]
    mlps = parts.dense(f"{name}.mlps.0"), parts.dense(f"{name}.mlps.1")
    return ShortcutBlock(layer, (first, second), mlps, experts, norms, parts.model.config.rms_norm_eps, reduce)


def _progress(names: list[Any], mesh: DCPMesh) -> Any:
    """Return the names with a bar for the first rank, if it has a terminal."""
    return tqdm(names, desc="loading weights", unit="layer", disable=None if mesh.tp_rank == 0 else True)


class _AttentionLayers:
    """A model's layers of attention as they are loaded, in the order of their calls."""

    def __init__(
        self,
        attention: AttentionKind,
        dcp: DCPConfig,
        mesh: DCPMesh,
        selection: ChosenExchange,
        weights: Mapping[str, Weight],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._attention, self._dcp, self._mesh = attention, dcp, mesh
        self._weights = weights
        self._where = dcp, mesh, selection.exchange, dtype, device
        self._missing: set[str] = set()
        self._count = 0

    def load(self, name: str) -> tuple[AttentionLayer, int]:
        """Load the next layer, and return it with its number."""
        weights = {
            key.removeprefix(f"{name}."): weight for key, weight in self._weights.items() if key.startswith(f"{name}.")
        }
        layer = self._count
        self._missing |= missing_scales(weights, self._dcp)
        attention = self._attention.new_layer(layer, *self._where)
        try:
            attention.load_weights(weights)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        self._count += 1
        return attention, layer

    def warn_of_missing_scales(self) -> None:
        if self._missing and self._mesh.tp_rank == 0:
            _logger.warning(
                "the checkpoint has no %s, so 1 is taken: e4m3 saturates at 448 and loses what is smaller than 0.001 "
                "(--kv-cache-scale gives a kv_scale, --calculate-kv-scales finds both)",
                " and no ".join(sorted(self._missing)),
            )


def _eos_token_ids(directory: Path, config: Any) -> frozenset[int]:
    """Return the end-of-sequence tokens of the generation config, else of the model's config."""
    eos = None
    if (directory / "generation_config.json").is_file():
        eos = transformers.GenerationConfig.from_pretrained(str(directory)).eos_token_id
    eos = config.eos_token_id if eos is None else eos
    return frozenset([eos] if isinstance(eos, int) else eos or [])
