"""A layer of Kimi Delta Attention, its heads sharded over the TP group."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dcpmla.attention.layers.linear.calls import DeltaCall, DeltaState, DeltaTokens, DeltaWeights
from dcpmla.attention.layers.linear.config import DeltaConfig
from dcpmla.attention.layers.linear.delta import attend_in_chunks, delta_attention, takes_chunks, touch_chunk_memory
from dcpmla.attention.layers.linear.step import DeltaMetadata, delta_metadata
from dcpmla.attention.placement import Placement, refuse_order
from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.cache.layers import LayerCache
from dcpmla.parallel.linear import Linear, RowParallelLinear, Weight, fill, read_linear, read_weight, shard
from dcpmla.parallel.quantized import PlainRows, plain


class DeltaAttention(nn.Module):
    """Kimi Delta Attention: projections, a short convolution, the recurrence over a state, a gated norm.

    Dims: T tokens, h heads of this rank, D their width.

    Args:
        config: Geometry of the whole layer, before it is sharded.
        placement: Ranks of the layer, and dtype and device of its parameters, uninitialized until `load_weights`.
    Attributes:
        in_proj: Projections to queries, keys, values, decays and gates or their low ranks, and beta.
    Raises:
        ValueError: Heads do not divide by the TP size.
    Source: Kimi Linear's report, section 3; projections are named as in Kimi's checkpoints.
    """

    conv: Tensor
    log_rate: Tensor
    decay_bias: Tensor
    norm: Tensor
    decay_proj: nn.Module
    gate_proj: nn.Module

    def __init__(self, config: DeltaConfig, placement: Placement) -> None:
        refuse_order("linear attention", placement.dcp)
        super().__init__()
        new: dict[str, Any] = placement.factory_kwargs
        hidden, dim, group = config.hidden_size, config.head_dim, placement.mesh.tp_group
        self.config, self._group = config, group
        self.num_heads = config.heads_per_rank(placement.mesh.tp_size)
        width = self.num_heads * dim
        is_low = [name in config.low_ranks for name in "fg"]
        self._widths = [3 * width, *(dim if low else width for low in is_low), self.num_heads]
        self.in_proj = Linear(hidden, sum(self._widths), **new)
        self.decay_proj, self.gate_proj = (Linear(dim, width, **new) if low else nn.Identity() for low in is_low)
        self.o_proj = RowParallelLinear(config.num_heads * dim, hidden, False, group, **new)
        self.register_buffer("conv", torch.empty(3 * width, config.conv_size, **new))
        self.register_buffer("norm", torch.empty(dim, **new))
        for name, size in (("log_rate", self.num_heads), ("decay_bias", width)):
            self.register_buffer(name, torch.empty(size, device=placement.device))

    @property
    def takes_quantized(self) -> bool:
        """Return whether the layer accepts quantized hidden states."""
        return self.in_proj.takes_quantized

    def load_weights(self, weights: Mapping[str, Weight]) -> None:
        """Read this rank's part of every parameter.

        Args:
            weights: Whole weights by their names in a checkpoint, or in transformers' module.
        Raises:
            ValueError: A weight is missing, or its shape does not match the config.
        """
        weights = {name.removeprefix("forget_gate."): weight for name, weight in weights.items()}
        config = self.config
        hidden, dim, width = config.hidden_size, config.head_dim, config.num_heads * config.head_dim
        columns, heads = shard(width, self._group), shard(config.num_heads, self._group)
        parts = [
            read_linear(weights, f"{name}_a_proj.weight", (dim, hidden))
            if name in config.low_ranks
            else read_linear(weights, f"{name}_proj.weight", (width, hidden), columns)
            for name in "qkvfg"
        ]
        self.in_proj.load(*parts, read_linear(weights, "b_proj.weight", (config.num_heads, hidden), heads))
        for linear, name in ((self.decay_proj, "f"), (self.gate_proj, "g")):
            if isinstance(linear, Linear):
                linear.load(read_linear(weights, f"{name}_b_proj.weight", (width, dim), columns))
        self.o_proj.load(read_linear(weights, "o_proj.weight", (hidden, width), slice(None), columns))
        self._load_convolution(weights, width, columns)
        has_four_dims = "A_log" in weights and len(weights["A_log"].shape) == 4  # Kimi Linear's, not Ling's
        rates = (1, 1, config.num_heads, 1) if has_four_dims else (config.num_heads,)
        fill(self.log_rate, read_weight(weights, "A_log", rates).flatten()[heads])
        fill(self.decay_bias, read_weight(weights, "dt_bias", (width,), columns))
        fill(self.norm, read_weight(weights, "o_norm.weight", (dim,)))

    def _load_convolution(self, weights: Mapping[str, Weight], width: int, columns: slice) -> None:
        """Read the convolution: a tensor for each of queries, keys and values, or transformers' one of all."""
        size = self.config.conv_size
        if "conv1d.weight" in weights:
            whole = read_weight(weights, "conv1d.weight", (3 * width, 1, size))
            parts = [part[columns] for part in whole.chunk(3)]
        else:
            parts = [read_weight(weights, f"{name}_conv1d.weight", (width, 1, size), columns) for name in "qkv"]
        fill(self.conv, *(part.flatten(1) for part in parts))

    def partial(self, hidden_states: PlainRows, cache: LayerCache | None, step: StepMetadata | None) -> Tensor:
        """Return this rank's part of the layer's output [T, hidden], before the sum over the TP ranks.

        Args:
            hidden_states: Hidden states [T, hidden], optionally quantized where `takes_quantized`; rows from
                step.num_tokens on are padding.
            cache: Cache of this layer, whose states (`DeltaState`) are read and written; None, like step, in a profile.
        """
        qkv, decay, gate, beta = self.in_proj(hidden_states).split(self._widths, -1)
        tokens = DeltaTokens(qkv, self.decay_proj(decay), beta, self.gate_proj(gate))
        out = plain(hidden_states).new_zeros(len(qkv), self.num_heads * self.config.head_dim)
        if step is not None:
            assert cache is not None
            self._attend(out, tokens, DeltaState(*cache.states), step)
        elif takes_chunks(out.device, out.dtype):
            touch_chunk_memory(out)
        return self.o_proj.partial(out)

    def _attend(self, out: Tensor, tokens: DeltaTokens, state: DeltaState, step: StepMetadata) -> None:
        """Write the output of a step's tokens."""
        metadata = step.derive(DeltaMetadata, delta_metadata)
        weights = DeltaWeights(self.conv, self.log_rate, self.decay_bias, self.norm)
        call = DeltaCall(out, tokens, weights, state, self.config.rms_norm_eps, self.config.decay_floor)
        delta_attention(call, metadata.recurrent)
        if metadata.pieces is not None:
            attend_in_chunks(call, metadata.pieces)
