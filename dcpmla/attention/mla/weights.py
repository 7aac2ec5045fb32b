"""The weights of an MLA layer that one rank holds, the projections by these weights, and the scales of the cache."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dcpmla.attention.head_factors import HeadFactors
from dcpmla.attention.mla.fp8_scales import KV_SCALE_NAMES, OUTPUT_SCALE_NAMES, Q_SCALE_NAMES, new_scale, read_scale
from dcpmla.attention.placement import Placement
from dcpmla.attention.projection_calls import LatentWrite, QueryAbsorption
from dcpmla.attention.projections import absorb_query, norm_rope_cache, project_latents, rotate_query_
from dcpmla.attention.select.step import SelectedTokens
from dcpmla.config import MLAConfig
from dcpmla.parallel.formats import BLOCK, AnyWeight, Quantized, is_block_fp8
from dcpmla.parallel.linear import Linear, RowParallelLinear, Weight, fill, read_linear, read_weight, shard, unquantized
from dcpmla.parallel.mesh import DCPMesh
from dcpmla.parallel.quantized import NormedRows, PlainRows, plain, unpack


class Tokens(NamedTuple):
    """Tokens of a step, as inputs of the query projection, and the selection of tokens that they attend to.

    Attributes:
        q_c: Query latents [T, Lq] after their norm; with query_gates [T, 2 Lq], followed by the latents before their
            norm. Where queries are not compressed: queries of `q_heads` [T, n (P + R)], without RoPE.
        cos_sin, query_factor: The tokens' rows of the same tensors in `StepMetadata`.
        selection: Selected tokens; None if each token attends to all tokens up to itself.
    """

    q_c: PlainRows
    cos_sin: Tensor | None
    query_factor: Tensor | None
    selection: SelectedTokens | None = None

    def rows(self, rows: slice) -> "Tokens":
        """Return the tokens in rows."""
        selection = None if self.selection is None else self.selection.rows(rows)
        cos_sin, factor = rows_or_none(self.cos_sin, rows), rows_or_none(self.query_factor, rows)
        return Tokens(self.q_c[rows], cos_sin, factor, selection)


class MHAInputs(NamedTuple):
    """Inputs of multi-head attention (MHA) of new tokens, to each other and to their contexts.

    Attributes:
        q: Queries of this rank's heads [T, h, P + R], rotated.
        gates: Logits [T, h, V] of gates of the output; None without query_gates.
        kv: The new tokens' nope part of keys and values [T, h (P + V)]; None if they are not projected yet.
        w_kv_b: Weight [h, P + V, L] that projects latents, of new tokens and of contexts, to kv.
    """

    q: Tensor
    gates: Tensor | None
    kv: Tensor | None
    w_kv_b: Tensor

    def rows(self, rows: slice) -> "MHAInputs":
        """Return the inputs of the tokens in rows."""
        return MHAInputs(self.q[rows], rows_or_none(self.gates, rows), rows_or_none(self.kv, rows), self.w_kv_b)


def rows_or_none(tensor: Tensor | None, tokens: slice) -> Tensor | None:
    """Return the tokens' rows of a tensor, or None if the tensor is None."""
    return None if tensor is None else tensor[tokens]


@dataclass(frozen=True)
class HeldHeads:
    """Neighbouring heads that a weight on one rank covers, in TP order: the rank's own heads, or its DCP group's.

    A DCP group is W neighbouring ranks of the TP group (`DCPMesh`), so the heads of its ranks are neighbours, too.

    Attributes:
        first: Number of the first head in the model.
        count: Number of heads.
        own: This rank's own heads, which its o_proj multiplies, as a slice of the held heads.
    """

    first: int
    count: int
    own: slice

    @classmethod
    def of(cls, mesh: DCPMesh, heads_per_rank: int, whole_group: bool) -> "HeldHeads":
        """Return the heads of this rank, or with whole_group the heads of its DCP group."""
        first_own = mesh.tp_rank * heads_per_rank
        if not whole_group:
            return cls(first_own, heads_per_rank, slice(0, heads_per_rank))
        before = mesh.dcp_rank * heads_per_rank  # heads of the group's ranks before this one
        return cls(first_own - before, mesh.dcp_size * heads_per_rank, slice(before, before + heads_per_rank))

    def rows(self, rows_per_head: int) -> slice:
        """Return the heads' rows of a model's whole weight, where each head has rows_per_head rows."""
        return slice(self.first * rows_per_head, (self.first + self.count) * rows_per_head)


class AttentionWeights(nn.Module):
    """Parameters and scales of `dcpmla.MLAAttention`, which documents arguments, errors and the scales.

    fused_qkv_a_proj stacks q_a on kv_a, or the whole query projection in a model that does not compress queries; only
    others have q_b_proj. kv_b_proj holds W_UK and W_UV. Every rank holds q_a, kv_a and the norms whole. Other weights
    are of this rank's `num_heads` heads; with dcp_q_replicate the query projection and kv_b_proj have all heads of the
    DCP group (`q_heads`, `kv_heads`), with dcp_project_before_merge kv_b_proj has them. A weight in fp8 stays fp8 where
    blocks of 128 x 128 remain whole. It is dequantized if the rank's slice cuts a block, if its columns are no multiple
    of 128, or if W_UK and W_UV share a block. Both weights of fused_qkv_a_proj are dequantized if the first one's rows
    are no multiple of 128, or if one of the two is not in fp8.
    """

    kv_scale: Tensor | None
    q_scale: Tensor | None
    sinks: nn.Parameter | None
    k_pe_layernorm: nn.RMSNorm | None
    output_gate: Linear | None
    head_factors: HeadFactors | None

    def __init__(self, config: MLAConfig, placement: Placement) -> None:
        super().__init__()
        dcp, mesh, device = placement.dcp, placement.mesh, placement.device
        self.config, self.dcp, self.mesh = config, dcp, mesh
        self.num_heads = config.heads_per_rank(mesh.tp_size)
        self.q_heads = HeldHeads.of(mesh, self.num_heads, dcp.dcp_q_replicate)
        self.kv_heads = HeldHeads.of(mesh, self.num_heads, dcp.dcp_q_replicate or dcp.dcp_project_before_merge)
        kv_scale = new_scale(dcp.kv_cache_scale, device) if dcp.kv_cache_dtype == "fp8" else None
        self.register_buffer("kv_scale", kv_scale, persistent=False)
        self.register_buffer(
            "q_scale", new_scale(None, device) if dcp.decode_query_dtype == "fp8" else None, persistent=False
        )
        self.sinks = self.k_pe_layernorm = self.output_gate = self.head_factors = None
        self.make_parameters(placement.factory_kwargs)

    def make_parameters(self, new: dict[str, Any]) -> None:
        """Make parameters that `load_weights` fills; `new` holds the keyword arguments of each."""
        config, width = self.config, self.config.input_parts * self.config.hidden_size
        if config.q_lora_rank is not None:
            self.q_b_proj = Linear(config.q_lora_rank * (1 + config.query_gates), self._q_dim, **new)
        self._make_down(new)
        kv_b_dim = self.kv_heads.count * (config.qk_nope_head_dim + config.v_head_dim)
        self.kv_b_proj = Linear(config.kv_lora_rank, kv_b_dim, **new)
        o_cols = config.num_heads * config.v_head_dim
        self.o_proj = RowParallelLinear(o_cols, config.hidden_size, config.attention_bias, self.mesh.tp_group, **new)
        if config.has_sinks:
            self.sinks = nn.Parameter(torch.empty(self.num_heads, dtype=torch.float32, device=new["device"]))
        if config.num_gates:
            self.output_gate = Linear(width, self.num_heads * config.num_gates, **new)
        if config.has_query_factors:
            self.head_factors = HeadFactors(config.num_heads, **new)

    def _make_down(self, new: dict[str, Any]) -> None:
        """Make the projection of hidden states, and the norms of latents."""
        config, width = self.config, self.config.input_parts * self.config.hidden_size
        num_rows = (config.q_lora_rank or self._q_dim) + config.down_width
        self.fused_qkv_a_proj = Linear(width, num_rows, config.attention_bias, **new)
        if config.q_lora_rank is not None:
            self.q_a_layernorm = nn.RMSNorm(config.q_lora_rank, config.rms_norm_eps, **new)
        self.kv_a_layernorm = nn.RMSNorm(config.kv_lora_rank, config.rms_norm_eps, **new)
        if config.norms_k_pe:
            self.k_pe_layernorm = nn.RMSNorm(config.qk_rope_head_dim, config.rms_norm_eps, **new)

    @property
    def _q_dim(self) -> int:
        """Number of columns of the queries of `q_heads`."""
        return self.q_heads.count * self.config.query_width

    def w_uk(self, heads: slice) -> Tensor | Quantized:
        """Return W_UK [n, P, L] of some of `kv_heads`, which is absorbed into decode's queries."""
        return self._w_kv_b(heads, slice(0, self.config.qk_nope_head_dim))

    def w_uv(self, heads: slice) -> Tensor | Quantized:
        """Return W_UV [n, V, L] of some of `kv_heads`, which turns attention over latents into values."""
        return self._w_kv_b(heads, slice(self.config.qk_nope_head_dim, None))

    def up_projection(self) -> Tensor:
        """Return each own head's W_UK stacked on its W_UV, [h, P + V, L]; fp8 is dequantized into new memory."""
        return unquantized(self._w_kv_b(self.kv_heads.own, slice(0, None)), self.kv_a_layernorm.weight)

    def _w_kv_b(self, heads: slice, rows: slice) -> Tensor | Quantized:
        """Return rows of each head's W_UK stacked on its W_UV; in fp8 they must begin and end at a block's boundary."""
        weight = self.kv_b_proj.weight.unflatten(0, (self.kv_heads.count, -1))[heads, rows]
        if self.kv_b_proj.weight_scale is None:
            return weight
        blocks = slice(rows.start // BLOCK, None if rows.stop is None else rows.stop // BLOCK)
        return Quantized(weight, self.kv_b_proj.weight_scale.unflatten(0, (self.kv_heads.count, -1))[heads, blocks])

    @property
    def takes_quantized(self) -> bool:
        """Return whether quantized hidden states save work."""
        return self.fused_qkv_a_proj.takes_quantized

    def project_hidden(self, hidden_states: PlainRows) -> tuple[Tensor | None, Tensor]:
        """Return queries of `q_heads` [T, n (P + R)], None if they are compressed, and q_c, kv_c and k_pe before their
        norms [T, Lq + L + R].
        """
        down = self.fused_qkv_a_proj(hidden_states)
        return (down[:, : self._q_dim], down[:, self._q_dim :]) if self.config.q_lora_rank is None else (None, down)

    def down_project(
        self, hidden_states: PlainRows, kv_cache: Tensor, slots: Tensor, cos_sin: Tensor | None
    ) -> tuple[PlainRows, Tensor]:
        """Cache the latents; return `Tokens.q_c`, and the latents before rounding."""
        config, has_q_c = self.config, self.config.q_lora_rank is not None
        queries, down = self.project_hidden(hidden_states)
        call = LatentWrite(
            down if config.projects_pe else F.pad(down, (0, config.qk_rope_head_dim)),
            kv_cache,
            slots,
            self.q_a_layernorm.weight if has_q_c else None,
            self.kv_a_layernorm.weight,
            config.rms_norm_eps,
            config.kv_lora_scale,
            cos_sin,
            config.rope_interleaved,
            self.kv_scale,
            has_q_c and self.q_b_proj.takes_quantized and not config.query_gates,
            None if self.k_pe_layernorm is None else self.k_pe_layernorm.weight,
        )
        q_c, latents, *codes = norm_rope_cache(call)
        if config.query_gates:
            return torch.cat([q_c, down[:, : q_c.shape[1]]], -1), latents
        # q_c with its fp8 codes, or alone if it was not quantized
        return NormedRows.join(q_c, *codes) if queries is None else queries, latents

    def project_query(self, tokens: Tokens, heads: slice) -> tuple[Tensor, Tensor | None]:
        """Return queries [T, n, P + R] before RoPE, times their factors, and with query_gates logits [T, n, V].

        `heads` is a slice of q_heads. Without projects_pe the last R columns are zeros.
        """
        config, width, gates = self.config, self.config.query_width, None
        columns = slice(heads.start * width, heads.stop * width)
        q = plain(tokens.q_c)[:, columns] if config.q_lora_rank is None else self.q_b_proj.product(tokens.q_c, columns)
        q = q.unflatten(-1, (-1, width))
        if config.query_gates:
            q, gates = q[..., : config.qk_head_dim], q[..., config.qk_head_dim :]
        num_zeros = config.qk_head_dim - q.shape[-1]
        if self.head_factors is not None:
            of_model = slice(self.q_heads.first + heads.start, self.q_heads.first + heads.stop)
            return self.head_factors(q, tokens.query_factor, of_model, num_zeros), gates
        if tokens.query_factor is not None:
            q = q * tokens.query_factor[:, None, None]
        return F.pad(q, (0, num_zeros)) if num_zeros else q, gates

    def prepare_mha(self, tokens: Tokens, own: Tensor | None = None) -> MHAInputs:
        """Return the queries of this rank's heads, the weight that projects latents to keys and values, and the tokens'
        own latents [T, L + R] projected, unless None leaves that to attention.
        """
        q, gates = self.project_query(tokens, self.q_heads.own)
        if tokens.cos_sin is not None:
            if self.config.q_lora_rank is None:
                q = q.clone(memory_format=torch.contiguous_format)  # absorbed queries rotate their own
            rotate_query_(q, tokens.cos_sin, self.config.rope_interleaved)
        w_kv_b, rank = self.up_projection(), self.config.kv_lora_rank
        kv = None if own is None else project_latents(own[:, :rank], w_kv_b, self.dcp.deterministic)
        return MHAInputs(q, gates, kv, w_kv_b)

    def absorb(self, q: Tensor, w_uk: Tensor | Quantized, cos_sin: Tensor | None, q_scale: Tensor | None) -> Tensor:
        codes, scales = unpack(w_uk)
        is_interleaved, is_deterministic = self.config.rope_interleaved, self.dcp.deterministic
        return absorb_query(QueryAbsorption(q, codes, cos_sin, is_interleaved, q_scale, scales, is_deterministic))

    def load_weights(self, weights: Mapping[str, Weight]) -> None:
        """Read this rank's part of every parameter, and the scales that no option gives.

        Args:
            weights: Whole weights by their names in a checkpoint, from "q_a_proj.weight" to "o_proj.weight"; only the
                slices that this rank needs are read. `mla/fp8_scales.py` has the names of scales; a missing scale
                of the cache or of queries is 1. Without "o_proj.input_scale" each input of o_proj determines its own
                scales.
        Raises:
            ValueError: A weight is missing or has another shape; a scale is not finite and above 0.
        """
        self.load_parameters(weights)
        if self.kv_scale is not None and self.dcp.kv_cache_scale is None:
            self.kv_scale.fill_(read_scale(weights, KV_SCALE_NAMES))
        if self.q_scale is not None:
            self.q_scale.fill_(read_scale(weights, Q_SCALE_NAMES))

    def load_parameters(self, weights: Mapping[str, Weight]) -> None:
        """Read this rank's part of every parameter (`load_weights`)."""
        config, tp_group = self.config, self.mesh.tp_group
        hidden, rank = config.hidden_size, config.kv_lora_rank
        kv_b_width, o_cols = config.qk_nope_head_dim + config.v_head_dim, config.num_heads * config.v_head_dim
        if config.q_lora_rank is not None:
            self.q_b_proj.load(self._read_queries(weights, "q_b_proj.weight", self.q_b_proj))
        self._load_down(weights)
        kv_b_shape = config.num_heads * kv_b_width, rank
        kv_b = read_linear(weights, "kv_b_proj.weight", kv_b_shape, self.kv_heads.rows(kv_b_width))
        # W_UK and W_UV stay in fp8 only in blocks that they do not share.
        if not is_block_fp8(kv_b) or config.qk_nope_head_dim % BLOCK or config.v_head_dim % BLOCK:
            kv_b = unquantized(kv_b, self.kv_b_proj.weight)
        self.kv_b_proj.load(kv_b)
        self.o_proj.load(read_linear(weights, "o_proj.weight", (hidden, o_cols), cols=shard(o_cols, tp_group)))
        if OUTPUT_SCALE_NAMES[0] in weights:
            self.o_proj.input_scale = new_scale(read_scale(weights, OUTPUT_SCALE_NAMES), self.o_proj.weight.device)
        if self.sinks is not None:
            fill(self.sinks, read_weight(weights, "sinks", (config.num_heads,), shard(config.num_heads, tp_group)))
        if self.output_gate is not None:
            num_rows = config.num_heads * config.num_gates
            shape = num_rows, self.output_gate.in_features
            self.output_gate.load(read_linear(weights, "g_proj.weight", shape, shard(num_rows, tp_group)))
        if self.head_factors is not None:
            self.head_factors.load_weights(weights)
        if config.attention_bias:
            fill(self.o_proj.bias, read_weight(weights, "o_proj.bias", (hidden,)))

    def _read_queries(self, weights: Mapping[str, Weight], name: str, linear: Linear) -> AnyWeight:
        """Read the rows of `q_heads` of a projection to queries."""
        width = self.config.query_width
        return read_linear(weights, name, (self.config.num_heads * width, linear.in_features), self.q_heads.rows(width))

    def _load_down(self, weights: Mapping[str, Weight]) -> None:
        config, linear = self.config, self.fused_qkv_a_proj
        q_rows = config.q_lora_rank or self._q_dim
        if config.q_lora_rank is None:
            queries = self._read_queries(weights, "q_proj.weight", linear)
        else:
            queries = read_linear(weights, "q_a_proj.weight", (q_rows, linear.in_features))
            fill(self.q_a_layernorm.weight, read_weight(weights, "q_a_layernorm.weight", (q_rows,)))
        linear.load(queries, read_linear(weights, "kv_a_proj_with_mqa.weight", (config.down_width, linear.in_features)))
        if config.attention_bias:  # a projection to whole queries has none
            has_bias = config.q_lora_rank is not None
            q_bias = read_weight(weights, "q_a_proj.bias", (q_rows,)) if has_bias else torch.zeros(q_rows)
            fill(linear.bias, q_bias, read_weight(weights, "kv_a_proj_with_mqa.bias", (config.down_width,)))
        fill(self.kv_a_layernorm.weight, read_weight(weights, "kv_a_layernorm.weight", (config.kv_lora_rank,)))
        if self.k_pe_layernorm is not None:
            k_pe_norm = read_weight(weights, "k_rope_only_layernorm.weight", (config.qk_rope_head_dim,))
            fill(self.k_pe_layernorm.weight, k_pe_norm)
