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

from dcpmla.config import MLAConfig
from dcpmla.hf_config import num_index_layers

_ATTENTION_PLAN = {  # of `MLAAttention`, which replaces transformers' own
    "q_proj": "colwise",
    "q_b_proj": "colwise",
    "kv_b_proj": "colwise",
    "o_proj": "rowwise",
}
_SCALE_BYTES = 4  # a float32 for each fp8 block
_WIDE_BYTES = 2  # fp8 weights are widened to bfloat16


@dataclass(frozen=True)
class Parameter:
    """All parameters of one name, layer numbers replaced by *, and one shape.

    Attributes:
        count: how many there are.
        style: "column" (outputs cut), "row" (inputs cut, so an all-reduce follows) or "whole" (on every rank).
        itemsize: bytes of an element in the checkpoint.
        scale_block: rows and columns that share a scale; None for weights that are not block-quantized.
    """

    name: str
    shape: tuple[int, ...]
    count: int
    style: str
    itemsize: int
    scale_block: tuple[int, int] | None

    def widened(self) -> "Parameter":
        """Return the same in bfloat16 if it is fp8."""
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
        num_bytes = prod(shape) * self.itemsize
        if self.scale_block is not None:
            rows, cols = (-(-size // block) for size, block in zip(shape[-2:], self.scale_block, strict=True))
            num_bytes += prod(shape[:-2]) * rows * cols * _SCALE_BYTES
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
    """

    attention: MLAConfig
    num_attention_layers: int
    num_index_layers: int
    max_position_embeddings: int
    num_routed: int
    experts_per_token: int
    ties_embeddings: bool
    parameters: tuple[Parameter, ...]

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
        return replace(self, attention=replace(self.attention, indexer=None), num_index_layers=0, parameters=layers)


def read_model(config: Any) -> ModelSize:
    """Return the sizes of a transformers config's model, in bfloat16 if it names no dtype; nothing is allocated.

    Raises:
        ValueError: an architecture that is not MLA, or a config that transformers builds no model of.
    """
    attention = MLAConfig.from_hf(config)
    try:
        with torch.device("meta"):
            model = getattr(transformers, type(config).__name__.replace("Config", "ForCausalLM"))(config)
    except Exception as error:  # of many kinds
        raise ValueError(f"model (--model): transformers builds no model of this config: {error}") from error
    num_routed, experts_per_token = _routing(config)
    return ModelSize(
        attention=attention,
        num_attention_layers=sum(hasattr(module, "kv_a_proj_with_mqa") for module in model.modules()),
        num_index_layers=num_index_layers(config),
        max_position_embeddings=config.max_position_embeddings,
        num_routed=num_routed,
        experts_per_token=experts_per_token,
        ties_embeddings=config.tie_word_embeddings,
        parameters=_group(model, config),
    )


def _routing(config: Any) -> tuple[int, int]:
    """Return the choices of a router, with LongCat's zero experts, and how many a token takes; 0 without experts."""
    num_choices = (getattr(config, "n_routed_experts", 0) or 0) + (getattr(config, "zero_expert_num", 0) or 0)
    return num_choices, getattr(config, "num_experts_per_tok", 0) or 0


def _group(model: nn.Module, config: Any) -> tuple[Parameter, ...]:
    """Return the parameters and stored buffers of all layers, equal ones counted."""
    itemsize = (config.dtype or torch.bfloat16).itemsize
    quantized, block = _quantized(model, getattr(config, "quantization_config", None) or {})
    stored = set(model.state_dict())
    groups: Counter[Parameter] = Counter()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in stored:
            is_buffer = not isinstance(tensor, nn.Parameter)  # routers' corrections: float32 in every checkpoint
            size = tensor.dtype.itemsize if is_buffer else 1 if name in quantized else itemsize
            rule = _wildcard(name)
            shape = tuple(tensor.shape)
            if len(shape) == 3:  # transformers makes room for LongCat's zero experts, which no checkpoint holds
                shape = (config.n_routed_experts, *shape[1:])
            groups[Parameter(rule, shape, 1, _style(rule, model), size, block if name in quantized else None)] += 1
    return tuple(Parameter(g.name, g.shape, count, g.style, g.itemsize, g.scale_block) for g, count in groups.items())


def _quantized(model: Any, quantization: dict[str, Any]) -> tuple[set[str], tuple[int, int] | None]:
    """Return the names of the parameters that a checkpoint holds in fp8 (linear layers, experts), and the block of
    their scales.
    """
    if not quantization:
        return set(), None
    whole = [*(quantization.get("modules_to_not_convert") or ["lm_head"]), *(model._keep_in_fp32_modules or [])]
    kept = "|".join(map(re.escape, whole))
    names = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    names |= {name for name, parameter in model.named_parameters() if parameter.ndim == 3}
    block = quantization.get("weight_block_size")
    return {name for name in names if not re.search(rf"(^|\.)({kept})(\.|$)", name)}, None if block is None else (
        block[0],
        block[1],
    )


def _style(rule: str, model: Any) -> str:
    """Return how transformers' plan for MLPs, experts, embedding and head, or ours for attention, cuts a parameter."""
    module = re.sub(r"\.(weight|bias)$", "", rule)
    if ".self_attn." in rule:
        style = _ATTENTION_PLAN.get(module.rpartition(".")[2], "")
    else:
        style = model._tp_plan.get(rule) or model._tp_plan.get(module) or ""
    if "embedding" in style or "colwise" in style:
        return "column"  # an embedding is cut along its vocabulary, its first dim
    return "row" if "rowwise" in style else "whole"


def _wildcard(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
