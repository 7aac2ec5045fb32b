"""A model's parameters without its weights: transformers builds it on the meta device, its tensor-parallel plan says
what is cut.
"""

import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
import transformers
from torch import nn

from dcpmla.cache.capacity import ModelCaches
from dcpmla.compressed_config import CompressedConfig
from dcpmla.config import MLAConfig
from dcpmla.hf_config import num_index_layers, read_attention

_ATTENTION_PLAN = {  # of `MLAAttention` and `CompressedAttention`, which replace transformers' own
    "q_proj": "colwise",
    "q_b_proj": "colwise",
    "kv_b_proj": "colwise",
    "o_proj": "rowwise",
    "sinks": "colwise",
    "o_a_proj": "colwise",
    "o_b_proj": "rowwise",
}
# Of DeepSeek-V4's one product of the hidden states: all but the query latent's part.
_JOINED = re.compile(
    r"\.self_attn\.(kv_proj|compressor\.(indexer\.)?(kv_proj|gate_proj|scorer\.weights_proj))\.weight$"
)
_SCALE_BYTES = 4  # a float32 for each fp8 block
_FP4_BYTES, _FP4_BLOCK, _FP4_SCALE_BYTES = 0.5, 32, 1  # of experts of DeepSeek-V4: e2m1, with a power of two for 32
_WIDE_BYTES = 2  # fp8 weights are widened to bfloat16


@dataclass(frozen=True)
class Parameter:
    """All parameters of one name, layer numbers replaced by *, and one shape.

    Attributes:
        count: how many there are.
        style: "column" (outputs cut), "row" (inputs cut, so an all-reduce follows) or "whole" (on every rank).
        itemsize: bytes of an element in the checkpoint: half a byte of experts in fp4.
        scale_block: rows and columns that share a scale; None for weights that are not block-quantized.
    """

    name: str
    shape: tuple[int, ...]
    count: int
    style: str
    itemsize: float
    scale_block: tuple[int, int] | None

    def widened(self) -> "Parameter":
        """Return the same in bfloat16 if it is fp8 or fp4."""
        return self if self.itemsize > 1 else replace(self, itemsize=_WIDE_BYTES, scale_block=None)

    def cuts_blocks(self, tensor_parallel_size: int) -> bool:
        """Return whether a rank's part is no whole number of blocks: attention reads any slice, transformers cuts MLPs
        and scales alike.
        """
        if self.scale_block is None or self.is_attention or self.style == "whole" or tensor_parallel_size == 1:
            return False
        dim = -1 if self.style == "row" else -2
        return self.shape[dim] % (self.scale_block[dim] * tensor_parallel_size) != 0

    @property
    def is_attention(self) -> bool:
        return ".self_attn." in self.name

    @property
    def is_indexer(self) -> bool:
        return ".indexer." in self.name

    @property
    def is_expert(self) -> bool:
        return len(self.shape) == 3

    @property
    def is_matrix(self) -> bool:
        """True if hidden states or tokens are multiplied by it, or look it up."""
        return len(self.shape) > 1 and not self.name.endswith((".position_bias", ".tid2eid"))

    @property
    def is_hyper_connection(self) -> bool:
        return self.name.endswith("_hc.fn")

    @property
    def is_joined(self) -> bool:
        """True if it is multiplied as a part of another one's product."""
        return _JOINED.search(self.name) is not None

    def shard_shape(self, tensor_parallel_size: int) -> tuple[int, ...]:
        """Return the shape on the rank that has most of it."""
        if self.style == "whole" or (self.style == "row" and len(self.shape) == 1):
            return self.shape
        shape = list(self.shape)
        dim = -1 if self.style == "row" else max(len(shape) - 2, 0)
        shape[dim] = -(-shape[dim] // tensor_parallel_size)
        return tuple(shape)

    def shard_bytes(self, tensor_parallel_size: int) -> int:
        """Return the bytes of one of them on the rank that has most of it, scales included."""
        shape = self.shard_shape(tensor_parallel_size)
        num_bytes = int(prod(shape) * self.itemsize)
        if self.scale_block is not None:
            rows, cols = (-(-size // block) for size, block in zip(shape[-2:], self.scale_block, strict=True))
            scale_bytes = _FP4_SCALE_BYTES if self.itemsize == _FP4_BYTES else _SCALE_BYTES
            num_bytes += prod(shape[:-2]) * rows * cols * scale_bytes
        return num_bytes


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Sizes of a model, as predictions need them.

    Attributes:
        num_attention_layers: caches; LongCat has two in a decoder layer.
        num_index_layers: index caches, of sparse MLA's layers with an indexer of their own.
        num_routed: choices of a router, LongCat's zero experts included; 0 without experts.
        experts_per_token: choices that a token takes.
        ties_embeddings: the head is the embedding.
        num_sinkhorn_iters: of each hyper-connection; 0 in a model without.
    """

    attention: MLAConfig | CompressedConfig
    num_attention_layers: int
    num_index_layers: int
    max_position_embeddings: int
    num_routed: int
    experts_per_token: int
    ties_embeddings: bool
    num_sinkhorn_iters: int
    parameters: tuple[Parameter, ...]

    @property
    def caches(self) -> ModelCaches:
        """The caches that it needs."""
        return ModelCaches(self.attention, self.num_attention_layers, self.num_index_layers)

    def weight_bytes(self, tensor_parallel_size: int) -> int:
        """Return the bytes of the fullest rank.

        Raises:
            ValueError: heads or experts that the runtime cannot divide so.
        """
        self.attention.heads_per_rank(tensor_parallel_size)
        for parameter in self.parameters:
            if parameter.is_expert and parameter.style == "row" and parameter.shape[-1] % tensor_parallel_size:
                raise ValueError(
                    f"tensor_parallel_size (-tp) is {tensor_parallel_size}; "
                    f"it must divide the experts' intermediate size {parameter.shape[-1]}"
                )
        return sum(parameter.count * parameter.shard_bytes(tensor_parallel_size) for parameter in self.parameters)

    def cuts_blocks(self, tensor_parallel_size: int) -> bool:
        """Return whether the runtime cannot load the checkpoint's fp8 blocks at this cut: they must be converted to
        bfloat16 first.
        """
        return any(parameter.cuts_blocks(tensor_parallel_size) for parameter in self.parameters)

    def widened(self) -> "ModelSize":
        """Return the model converted to bfloat16."""
        return replace(self, parameters=tuple(parameter.widened() for parameter in self.parameters))

    @cached_property
    def attention_stack(self) -> "ModelSize":
        """Its attention layers alone, as `MLAAttention` holds them; of sparse MLA without indexers, as benchmarks of
        layers have it.
        """
        layers = tuple(
            parameter.widened() for parameter in self.parameters if parameter.is_attention and not parameter.is_indexer
        )
        assert isinstance(self.attention, MLAConfig)
        return replace(self, attention=replace(self.attention, indexer=None), num_index_layers=0, parameters=layers)


def read_model(config: Any) -> ModelSize:
    """Return the sizes of a transformers config's model, in bfloat16 if it names no dtype; nothing is allocated.

    Raises:
        ValueError: an architecture that is not known, or a config that transformers builds no model of.
    """
    attention = read_attention(config)
    try:
        with torch.device("meta"):
            model = getattr(transformers, type(config).__name__.replace("Config", "ForCausalLM"))(config)
    except Exception as error:  # of many kinds
        raise ValueError(f"model (--model): transformers builds no model of this config: {error}") from error
    num_routed, experts_per_token = _routing(config)
    if isinstance(attention, CompressedConfig):
        num_layers, num_indexers = len(attention.layer_kinds), sum(kind.has_indexer for kind in attention.layer_kinds)
    else:
        num_layers = sum(hasattr(module, "kv_a_proj_with_mqa") for module in model.modules())
        num_indexers = num_index_layers(config)
    return ModelSize(
        attention=attention,
        num_attention_layers=num_layers,
        num_index_layers=num_indexers,
        max_position_embeddings=config.max_position_embeddings,
        num_routed=num_routed,
        experts_per_token=experts_per_token,
        ties_embeddings=config.tie_word_embeddings,
        num_sinkhorn_iters=getattr(config, "hc_sinkhorn_iters", 0),
        parameters=_group(model, config),
    )


def _routing(config: Any) -> tuple[int, int]:
    """Return the choices of a router, with LongCat's zero experts, and how many a token takes; 0 without experts."""
    num_choices = (getattr(config, "n_routed_experts", 0) or 0) + (getattr(config, "zero_expert_num", 0) or 0)
    return num_choices, getattr(config, "num_experts_per_tok", 0) or 0


def _group(model: nn.Module, config: Any) -> tuple[Parameter, ...]:
    """Return the parameters and stored buffers of all layers, equal ones counted."""
    itemsize = (config.dtype or torch.bfloat16).itemsize
    quantization = getattr(config, "quantization_config", None) or {}
    quantized, block = _quantized(model, quantization)
    has_fp4_experts = quantization.get("expert_dtype") == "fp4"
    stored = set(model.state_dict())
    groups: Counter[Parameter] = Counter()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in stored:
            is_buffer = not isinstance(tensor, nn.Parameter)  # routers' corrections: float32 in every checkpoint
            is_wide = is_buffer or _is_among(name, model._keep_in_fp32_modules_strict)
            size: float = tensor.dtype.itemsize if is_wide else 1 if name in quantized else itemsize
            rule, scale_block = _wildcard(name), block if name in quantized else None
            shape = tuple(tensor.shape)
            if len(shape) == 3:  # transformers makes room for LongCat's zero experts, which no checkpoint holds
                shape = (config.n_routed_experts, *shape[1:])
                if has_fp4_experts:
                    size, scale_block = _FP4_BYTES, (1, _FP4_BLOCK)
            groups[Parameter(rule, shape, 1, _style(rule, model), size, scale_block)] += 1
    return tuple(replace(group, count=count) for group, count in groups.items())


def _quantized(model: Any, quantization: dict[str, Any]) -> tuple[set[str], tuple[int, int] | None]:
    """Return the names of the parameters that a checkpoint holds in fp8 (linear layers, experts), and the block of
    their scales.
    """
    if not quantization:
        return set(), None
    whole = [*(quantization.get("modules_to_not_convert") or ["lm_head"]), *(model._keep_in_fp32_modules or [])]
    names = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    names |= {name for name, parameter in model.named_parameters() if parameter.ndim == 3}
    block = quantization.get("weight_block_size")
    kept = {name for name in names if not _is_among(name, whole)}
    return kept, None if block is None else (block[0], block[1])


def _is_among(name: str, modules: Any) -> bool:
    """Return whether a parameter is, or belongs to, one of some modules, whose names may be the last parts of it."""
    return any(re.search(rf"(^|\.){re.escape(module)}(\.|$)", name) for module in modules or ())


def _style(rule: str, model: Any) -> str:
    """Return how transformers' plan for MLPs, experts, embedding and head, or ours for attention, cuts a parameter."""
    module = re.sub(r"\.(weight|bias)$", "", rule)
    if ".self_attn." in rule:
        style = "" if ".indexer." in rule else _ATTENTION_PLAN.get(module.rpartition(".")[2], "")
    else:
        style = model._tp_plan.get(rule) or model._tp_plan.get(module) or ""
    if "embedding" in style or "colwise" in style:
        return "column"  # an embedding is cut along its vocabulary, its first dim
    return "row" if "rowwise" in style else "whole"


def _wildcard(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
