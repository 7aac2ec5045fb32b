"""A layer with keys and values of each head over a cache sharded by tokens. `GroupedAttention.partial` reads top to
bottom.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dcpmla.attention.layers.grouped.attention import grouped_attention, write_keys_values
from dcpmla.attention.layers.grouped.calls import GroupedCall
from dcpmla.attention.layers.grouped.config import GroupedConfig
from dcpmla.attention.placement import Placement
from dcpmla.attention.projections import rotate_query_
from dcpmla.attention.step.metadata import StepMetadata, begin_attention, part_tokens
from dcpmla.cache.layers import LayerCache
from dcpmla.parallel.linear import Linear, RowParallelLinear, Weight, read_linear, shard
from dcpmla.parallel.quantized import PlainRows, plain


class GroupedAttention(nn.Module):
    """Attention with keys and values of each head (MHA), or of each group of heads (GQA).

    Heads are cut over the TP group, tokens over the DCP group, as in MLA. A DCP group has the queries of a part of the
    heads, so a cached row holds the keys and values of all heads that they attend to: each rank attends with all the
    group's queries to its own tokens, and results are merged by their LSE. All tokens take this route, prompts too.

    Dims: T tokens, h heads of queries and g heads of keys and values of this rank, D their width, W ranks of the DCP
    group. G heads of keys and values belong to the group; where g = 1, several ranks may have the same one.

    With dcp.deterministic sums have no fixed order here: drafts do not change which tokens are accepted.

    Args:
        config: Geometry of the whole layer, before it is sharded.
        placement: Ranks of the layer, and dtype and device of its parameters. `load_weights` initializes them.
    Attributes:
        in_proj: Projections to this rank's queries, then to the key and the value of each of its heads.
    Raises:
        ValueError: Heads do not divide by the TP size.
    Source: GQA (Ainslie et al., 2023); projections are named as in Llama's checkpoints.
    """

    def __init__(self, config: GroupedConfig, placement: Placement) -> None:
        super().__init__()
        new: dict[str, Any] = placement.factory_kwargs
        mesh, dim = placement.mesh, config.head_dim
        self.config, self.dcp, self._mesh, self._exchange = config, placement.dcp, mesh, placement.exchange
        self.num_heads = config.heads_per_rank(mesh.tp_size)
        self.num_kv_heads = config.kv_width(mesh.tp_size) // (2 * dim)
        group_width = config.kv_width(mesh.tp_size // mesh.dcp_size)
        self._num_copies = mesh.dcp_size * 2 * dim * self.num_kv_heads // group_width  # ranks with the same heads
        self.in_proj = Linear(
            config.input_parts * config.hidden_size, (self.num_heads + 2 * self.num_kv_heads) * dim, **new
        )
        self.o_proj = RowParallelLinear(config.num_heads * dim, config.hidden_size, False, mesh.tp_group, **new)

    @property
    def takes_quantized(self) -> bool:
        """Return whether the layer accepts quantized hidden states."""
        return self.in_proj.takes_quantized

    def load_weights(self, weights: Mapping[str, Weight]) -> None:
        """Read this rank's part of every parameter.

        Args:
            weights: Whole weights by their names in a checkpoint: q_proj, k_proj, v_proj and o_proj.
        Raises:
            ValueError: A weight is missing, its shape does not match the config, or there are biases or norms of
                queries and keys.
        """
        for name in weights:
            if name.endswith(".bias") or "norm" in name:
                raise ValueError(f"checkpoint: tensor {name} is there; layers with biases or norms are not computed")
        config, dim = self.config, self.config.head_dim
        columns, width = config.input_parts * config.hidden_size, config.num_heads * dim
        own = shard(width, self._mesh.tp_group)
        first = self._mesh.tp_rank * config.num_kv_heads // self._mesh.tp_size
        keys_values = [
            read_linear(
                weights, f"{name}.weight", (config.num_kv_heads * dim, columns), slice(head * dim, (head + 1) * dim)
            )
            for head in range(first, first + self.num_kv_heads)
            for name in ("k_proj", "v_proj")
        ]
        self.in_proj.load(read_linear(weights, "q_proj.weight", (width, columns), own), *keys_values)
        self.o_proj.load(read_linear(weights, "o_proj.weight", (config.hidden_size, width), slice(None), own))

    def partial(self, hidden_states: PlainRows, cache: LayerCache | None, step: StepMetadata | None) -> Tensor:
        """Return this rank's part of the layer's output [T, hidden], before the sum over the TP ranks. Collective.

        Args:
            hidden_states: Hidden states [T, input_parts hidden]; rows from step.num_tokens on are padding.
            cache: Cache of the layer, read and written: keys and values in the model's dtype; None, like step, in a
                profile.
            step: Step with the angles of its positions.
        """
        qkv = self.in_proj(hidden_states).unflatten(1, (-1, self.config.head_dim))
        out = plain(hidden_states).new_zeros(len(qkv), self.num_heads, self.config.head_dim)
        if step is None:
            self._touch_peak_memory(qkv)
        else:
            step.run_outside_graph(self._attend, qkv, cache, out)
        return self.o_proj.partial(out.flatten(1))

    def _attend(self, qkv: Tensor, cache: LayerCache, out: Tensor, step: StepMetadata) -> None:
        """Cache the keys and values of a step's tokens, and write the heads' outputs, part by part, so that memory is
        bounded. Collective.
        """
        begin_attention(cache.loads, cache.starts)
        qkv = qkv[: step.num_tokens]
        assert step.cos_sin is not None
        rotate_query_(qkv[:, : self.num_heads], step.cos_sin, False)
        rotate_query_(qkv[:, self.num_heads :: 2], step.cos_sin, False)
        tokens, lens = step.tokens, step.tokens.local_seq_lens
        if step.prefill is not None:  # graphs with prompts lay these numbers out for decodes alone
            lens = step.layout.owner.local_seq_lens(tokens.seq_lens)
        # The dtype of cached latents may have 8 bits; rows of keys and values are bytes then.
        kv_cache, scale = cache.latents.view(qkv.dtype), self.config.softmax_scale
        call = GroupedCall(qkv, kv_cache, step.table.block_table, tokens.request, lens, scale)
        for start in range(0, len(qkv), self._part_tokens):
            rows = slice(start, start + self._part_tokens)
            out[: len(qkv)][rows] = self._attend_part(call, rows, tokens.slots[rows].clone())

    def _attend_part(self, call: GroupedCall, rows: slice, slots: Tensor) -> Tensor:
        """Return the outputs [n, h, D] of some of the tokens. Collective."""
        of_ranks = self._exchange.gather_heads(call.q[rows]).unflatten(1, (self.dcp.decode_context_parallel_size, -1))
        queries, keys_values = of_ranks.tensor_split((self.num_heads,), 2)
        keys_values = keys_values[:, :: self._num_copies].flatten(1, 2).unflatten(1, (-1, 2)).flatten(2)
        write_keys_values(keys_values, slots, call.cache)
        # Copies, because a slice may begin between multiples of 16 bytes: Triton would compile other kernels.
        part = call._replace(
            q=queries.flatten(1, 2), request=call.request[rows].clone(), seq_lens=call.seq_lens[rows].clone()
        )
        out, _ = self._exchange.combine(*grouped_attention(part))
        return out

    @property
    def _part_tokens(self) -> int:
        """Return the maximum tokens that attend at a time."""
        num_rows = self.num_heads + 2 * self.num_kv_heads
        return part_tokens(num_rows * self.dcp.decode_context_parallel_size, self.dcp)

    def _touch_peak_memory(self, qkv: Tensor) -> None:
        """Allocate and free the memory of attention in the largest part of a step: gathered rows, queries alone,
        results before and after the merge over ranks, and float32 results for parts of the keys.
        """
        num_rows = min(len(qkv), self._part_tokens) * qkv.shape[1] * self.dcp.decode_context_parallel_size
        torch.empty(6 * num_rows, self.config.head_dim, dtype=qkv.dtype, device=qkv.device)
