"""The part of a layer of DeepSeek-V4's attention that one rank holds."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dcpmla.attention.layers.compressed.config import CompressedConfig, LayerKind
from dcpmla.attention.layers.compressed.projections import GROUP, norm_rope_query_, unrope_heads
from dcpmla.attention.mla.weights import HeldHeads
from dcpmla.attention.placement import Placement
from dcpmla.parallel.formats import BLOCK, AnyWeight, is_packed
from dcpmla.parallel.fp8 import multiply_groups
from dcpmla.parallel.linear import Linear, RowParallelLinear, Weight, fill, read_linear, read_weight
from dcpmla.parallel.quantized import AnyRows, PlainRows, QuantizedRows, plain
from dcpmla.parallel.reformat import reorder_rows


class GroupedLinear(Linear):
    """G linear layers, one per group of columns: [T, G in] -> [T, out]; each makes out / G columns."""

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, False, device, dtype)
        self.num_groups = num_groups

    def forward(self, x: AnyRows) -> Tensor:
        if self.weight_scale is None:
            return multiply_groups(plain(x), self.weight.unflatten(0, (self.num_groups, -1)))
        return self.product(x)

    def _stays_quantized(self, parts: tuple[AnyWeight, ...]) -> bool:
        is_whole = self.out_features // self.num_groups % BLOCK == 0 and not is_packed(parts[0])
        return is_whole and super()._stays_quantized(parts)


class CompressorWeights(nn.Module):
    """The weights that pool tokens into entries [D].

    Attributes:
        bias: Bias of the gates; zeros in models that have none.
    """

    bias: Tensor

    def __init__(
        self, ratio: int, num_halves: int, width: int, device: torch.device | str, has_bias: bool = True
    ) -> None:
        super().__init__()
        bias = torch.zeros(ratio, num_halves * width, dtype=torch.float32, device=device)
        if has_bias:
            self.bias = nn.Parameter(bias)
        else:
            self.register_buffer("bias", bias, persistent=False)
        self.norm = nn.Parameter(torch.empty(width, dtype=torch.float32, device=device))

    def load_weights(self, weights: Mapping[str, Weight], prefix: str, order: Tensor | None = None) -> None:
        """Read bias and norm by their names in a checkpoint, columns of D in another order if one is given."""
        (ratio, columns), width = self.bias.shape, len(self.norm)
        order = torch.arange(width) if order is None else order
        if isinstance(self.bias, nn.Parameter):
            bias = read_weight(weights, f"{prefix}position_bias", (ratio, columns))
            fill(self.bias, bias.unflatten(1, (-1, width))[..., order].flatten(1))
        fill(self.norm, read_weight(weights, f"{prefix}kv_norm.weight", (width,))[order])


class CompressedWeights(nn.Module):
    """Parameters of `CompressedAttention`, which documents arguments and errors.

    Attributes:
        down_proj: Projection of hidden states to, in this order, query latent and shared row together, values and gates
            of entries, values and gates of index keys, weights of the indexer's heads (`down_widths`); a layer
            leaves out the ones it does not need. Checkpoints quantize only the query latent and the shared row, whose
            weights are dequantized to join the others.
        index_q_proj: Projection to the indexer's queries; their rotated columns come first, as in its keys.
        index_k_proj, index_k_norm: Projection of entries to index keys, and its norm, where keys come from entries.
        o_a_proj: Projection of each group of heads, from heads of a group x D to o_lora_rank.
    """

    o_a_proj: Linear

    def __init__(self, config: CompressedConfig, kind: LayerKind, placement: Placement) -> None:
        super().__init__()
        dcp, mesh = placement.dcp, placement.mesh
        config.check_layout(dcp)
        self.config, self.kind, self.dcp, self.mesh, self.dtype = config, kind, dcp, mesh, placement.dtype
        self.num_heads = config.heads_per_rank(mesh.tp_size)
        self.q_is_replicated = dcp.dcp_q_replicate and kind.ratio > 0
        self.q_heads = HeldHeads.of(mesh, self.num_heads, self.q_is_replicated)
        self.num_groups = config.o_groups // mesh.tp_size
        self.low_width = self.num_groups * config.o_lora_rank
        self.num_halves, self.writes = config.num_halves(kind), kind.ratio > 0 and kind.writes
        pairs, indexer = ("kv", "gate") if kind.ratio > 1 else ("kv",), "compressor.indexer."
        # The weights that each part is projected by, with their numbers of rows.
        self.down_parts = [[("q_a_proj", config.q_lora_rank), ("kv_proj", config.head_dim)]]
        if self.writes:
            self.down_parts.append([(f"compressor.{name}_proj", self.num_halves * config.head_dim) for name in pairs])
        if kind.has_indexer and not config.has_entry_keys:
            rows = self.num_halves * config.indexer.head_dim
            self.down_parts.append([(f"{indexer}{name}_proj", rows) for name in pairs])
        if kind.has_indexer:
            self.down_parts.append([(f"{indexer}scorer.weights_proj", config.indexer.num_heads)])
        self.down_widths = [sum(rows for _, rows in part) for part in self.down_parts]
        self.make_parameters(placement.factory_kwargs)

    def make_parameters(self, new: dict[str, Any]) -> None:
        """Make parameters that `load_weights` fills; `new` holds the keyword arguments of each."""
        config, kind, indexer, device = self.config, self.kind, self.config.indexer, new["device"]
        if self.writes:
            has_bias = not config.has_entry_keys
            self.compressor = CompressorWeights(kind.ratio, self.num_halves, config.head_dim, device, has_bias)
        if kind.has_indexer:
            if not config.has_entry_keys:
                self.index_compressor = CompressorWeights(kind.ratio, self.num_halves, indexer.head_dim, device)
            elif self.writes:
                self.index_k_proj = Linear(config.head_dim, indexer.head_dim, **new)
                self.index_k_norm = nn.Parameter(torch.empty(indexer.head_dim, dtype=torch.float32, device=device))
            self.index_q_proj = Linear(config.q_lora_rank, indexer.num_heads * indexer.head_dim, **new)
        self.down_proj = Linear(config.hidden_size, sum(self.down_widths), **new)
        self.q_norm = nn.Parameter(torch.empty(config.q_lora_rank, dtype=torch.float32, device=device))
        self.kv_norm = nn.Parameter(torch.empty(config.head_dim, dtype=torch.float32, device=device))
        self.q_b_proj = Linear(config.q_lora_rank, self.q_heads.count * config.head_dim, **new)
        self.sinks = nn.Parameter(torch.empty(self.num_heads, dtype=torch.float32, device=device))
        group_width = config.num_heads // config.o_groups * config.head_dim
        self.o_a_proj = GroupedLinear(self.num_groups, group_width, self.low_width, **new)
        o_rank = config.o_groups * config.o_lora_rank
        self.o_b_proj = RowParallelLinear(o_rank, config.hidden_size, False, self.mesh.tp_group, **new)

    def down_project(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """Return the parts of the down-projection [T, ..], as many and as wide as `down_widths`."""
        return self.down_proj(hidden_states).split(self.down_widths, -1)

    def project_query(self, q_c: PlainRows, cos_sin: Tensor, heads: slice) -> Tensor:
        """Return the queries [T, n, D] of n heads on this rank, rotated, after their norm where they have one."""
        width = self.config.head_dim
        q = self.q_b_proj.product(q_c, slice(heads.start * width, heads.stop * width)).unflatten(-1, (-1, width))
        norm_rope_query_(q, self.config.rms_norm_eps if self.config.norms_queries else None, cos_sin)
        return q

    def finish(self, out: Tensor, lse: Tensor, cos_sin: Tensor, num_rows: int) -> Tensor:
        """Run the operations from attention to the last projection: the sink, RoPE's inverse, the groups' projections.

        Args:
            out, lse: Attention of this rank's heads over all rows, [T, h, D] and [T, h] float32.
            num_rows: Rows of the batch, padding included.
        Returns:
            [num_rows, groups x o_lora_rank] in the dtype of out; zeros after the first T rows.
        """
        quantizes = self.o_a_proj.takes_quantized and self.config.head_dim % GROUP == 0
        heads, scales = (part.flatten(1) for part in unrope_heads(out, lse, self.sinks, cos_sin, quantizes))
        low = self.o_a_proj(QuantizedRows(heads, scales) if quantizes else heads)
        num_padding = num_rows - len(low)
        return torch.nn.functional.pad(low, (0, 0, 0, num_padding)) if num_padding else low

    def load_weights(self, weights: Mapping[str, Weight]) -> None:
        """Read this rank's part of every parameter.

        Args:
            weights: Whole weights by their names in transformers' checkpoints, from "q_a_proj.weight" to "sinks".
        Raises:
            ValueError: A weight is missing, or its shape does not match the config.
        """
        config, hidden = self.config, self.config.hidden_size
        rank, width = config.q_lora_rank, config.head_dim
        # Rotated columns of the indexer are put first: kernels that write index keys expect them there.
        order = torch.arange(config.indexer.head_dim).roll(config.rope_dim)
        down = list[AnyWeight]()
        for name, rows in (weight for part in self.down_parts for weight in part):
            weight = read_linear(weights, f"{name}.weight", (rows, hidden))
            is_reordered = name.startswith("compressor.indexer.") and "scorer" not in name
            down.append(reorder_rows(weight, order) if is_reordered else weight)
        self.down_proj.load(*down)
        if self.writes:
            self.compressor.load_weights(weights, "compressor.")
        if self.kind.has_indexer:
            self._load_indexer(weights, order)
        fill(self.q_norm, read_weight(weights, "q_a_norm.weight", (rank,)))
        fill(self.kv_norm, read_weight(weights, "kv_norm.weight", (width,)))
        q_shape = config.num_heads * width, rank
        self.q_b_proj.load(read_linear(weights, "q_b_proj.weight", q_shape, self.q_heads.rows(width)))
        own = slice(self.mesh.tp_rank * self.num_heads, (self.mesh.tp_rank + 1) * self.num_heads)
        fill(self.sinks, read_weight(weights, "sinks", (config.num_heads,), own))
        first = self.mesh.tp_rank * self.num_groups * config.o_lora_rank
        part = slice(first, first + self.num_groups * config.o_lora_rank)
        o_rank = config.o_groups * config.o_lora_rank
        self.o_a_proj.load(read_linear(weights, "o_a_proj.weight", (o_rank, self.o_a_proj.in_features), part))
        self.o_b_proj.load(read_linear(weights, "o_b_proj.weight", (hidden, o_rank), slice(None), part))

    def _load_indexer(self, weights: Mapping[str, Weight], order: Tensor) -> None:
        """Read the indexer, its columns in an order."""
        indexer, prefix = self.config.indexer, "compressor.indexer."
        q_shape = indexer.num_heads * indexer.head_dim, self.config.q_lora_rank
        self.index_q_proj.load(reorder_rows(read_linear(weights, f"{prefix}q_b_proj.weight", q_shape), order))
        if not self.config.has_entry_keys:
            self.index_compressor.load_weights(weights, prefix, order)
        elif self.writes:
            k_proj = read_linear(weights, f"{prefix}k_proj.weight", (indexer.head_dim, self.config.head_dim))
            self.index_k_proj.load(reorder_rows(k_proj, order))
            fill(self.index_k_norm, read_weight(weights, f"{prefix}kv_norm.weight", (indexer.head_dim,))[order])
