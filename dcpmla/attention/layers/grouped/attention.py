"""Attention with keys and values of each head over a paged cache: plain torch, which specifies the kernels."""

import torch
from torch import Tensor

from dcpmla.attention.layers.grouped.calls import GroupedCall
from dcpmla.operators import nothing, operator

_KERNELS = "dcpmla.attention.layers.grouped.kernels"


@operator("write_keys_values", kernel=f"{_KERNELS}.write:write_keys_values", fake=nothing, mutates_args=("cache",))
def write_keys_values(rows: Tensor, slots: Tensor, cache: Tensor) -> None:
    """Write keys and values of tokens into a cache.

    Args:
        rows: Keys and values [T, G, 2 D] of each head.
        slots: Slots of this rank [T], int64; a row with -1 is skipped.
        cache: Cache [num_blocks, block_size, 2 G D].
    """
    is_own = slots >= 0
    slots = slots[is_own]
    cache[slots // cache.shape[1], slots % cache.shape[1]] = rows[is_own].flatten(1)


@operator(
    "grouped_attention",
    kernel=f"{_KERNELS}.attention:grouped_attention",
    fake=lambda call: (torch.empty_like(call.q), call.q.new_empty(call.q.shape[:2], dtype=torch.float32)),
)
def grouped_attention(call: GroupedCall) -> tuple[Tensor, Tensor]:
    """Attend to cached keys and values.

    Returns:
        out [T, H, D] in q's dtype, lse [T, H] float32, natural log; (0, -inf) for a token that sees no key.
    """
    q, cache, block_table, request, seq_lens, scale = call
    dtype = torch.promote_types(q.dtype, torch.float32)
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    for number in request[seq_lens > 0].unique().tolist():
        rows = ((request == number) & (seq_lens > 0)).nonzero()[:, 0]
        lens = seq_lens[rows]
        most = int(lens.max())
        blocks = block_table[number, : -(-most // cache.shape[1])]
        keys, values = cache[blocks].flatten(0, 1)[:most].to(dtype).unflatten(1, (call.num_kv_heads, 2, -1)).unbind(2)
        queries = q[rows].to(dtype).unflatten(1, (call.num_kv_heads, -1))
        scores = torch.einsum("tghd,sgd->tghs", queries, keys) * scale
        is_seen = torch.arange(most, device=q.device) < lens[:, None]
        scores = scores.masked_fill(~is_seen[:, None, None], -torch.inf)
        out[rows] = torch.einsum("tghs,sgd->tghd", scores.softmax(-1), values).flatten(1, 2).to(q.dtype)
        lse[rows] = scores.logsumexp(-1).flatten(1, 2).to(torch.float32)
    return out, lse
