"""Multi-head attention of a ragged batch of prefill tokens as one Triton kernel; `reference.mha_prefill` specifies it.

One program computes a tile of one request's queries for one head over all keys that they see (FlashAttention-2). The rope part of a key is
the same for all heads and is read where it lies, so keys are never put together in memory.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2_E = 1.4426950408889634


@triton.jit
def _find_tile(start_loc_ptr, num_reqs, slot, BLOCK_M: tl.constexpr):
    """The request that a slot belongs to, and which of its tiles the slot is.

    Request r has the slots from start[r] // BLOCK_M + r on: as many as it has tiles, or one more. No table, and no word from the host.
    """
    low = 0
    high = num_reqs
    while low < high - 1:
        middle = (low + high) // 2
        if tl.load(start_loc_ptr + middle) // BLOCK_M + middle <= slot:
            low = middle
        else:
            high = middle
    return low, slot - (tl.load(start_loc_ptr + low) // BLOCK_M + low)


@triton.jit
def _load(at, is_row, is_column, MASK_ROWS: tl.constexpr, MASK_COLUMNS: tl.constexpr):
    """A tile, zeros outside. Rows behind a request's end are not its own and may hold NaN, which a weight of 0 does not silence."""
    if MASK_ROWS and MASK_COLUMNS:
        tile = tl.load(at, mask=is_row[:, None] & is_column[None, :], other=0.0)
    elif MASK_ROWS:
        tile = tl.load(at, mask=is_row[:, None], other=0.0)
    elif MASK_COLUMNS:
        tile = tl.load(at, mask=is_column[None, :], other=0.0)
    else:
        tile = tl.load(at)
    return tile


@triton.jit
def _attend(
    acc,
    peak,
    total,
    q_nope,
    q_pe,
    k_nope_ptr,
    k_pe_ptr,
    v_ptr,
    k_nope_stride,
    k_pe_stride,
    v_stride,
    query,
    scale_log2,
    first,
    last,
    num_keys,
    P: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    P_TILE: tl.constexpr,
    R_TILE: tl.constexpr,
    V_TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Online softmax, base 2, over the keys [first, last). MASKED: some lie behind the request's end, or behind some query."""
    row = tl.arange(0, BLOCK_N)
    p, r, d = tl.arange(0, P_TILE), tl.arange(0, R_TILE), tl.arange(0, V_TILE)
    # 32 bits are enough within a tile; where it begins takes 64.
    k_nope_at = row[:, None] * k_nope_stride + p[None, :]
    k_pe_at = row[:, None] * k_pe_stride + r[None, :]
    v_at = row[:, None] * v_stride + d[None, :]
    for begin in range(first, last, BLOCK_N):
        tile = tl.cast(begin, tl.int64)
        key = begin + row
        k_nope = _load(k_nope_ptr + tile * k_nope_stride + k_nope_at, key < num_keys, p < P, MASKED, P < P_TILE)
        k_pe = _load(k_pe_ptr + tile * k_pe_stride + k_pe_at, key < num_keys, r < R, MASKED, R < R_TILE)
        scores = tl.dot(q_nope, k_nope.T)
        scores = tl.dot(q_pe, k_pe.T, scores)
        if MASKED:
            visible = (key < num_keys)[None, :]
            if CAUSAL:
                visible = visible & (key[None, :] <= query[:, None])
            scores = tl.where(visible, scores, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * scale_log2)
        probs = tl.exp2(scores * scale_log2 - new_peak[:, None])
        correction = tl.exp2(peak - new_peak)
        total = total * correction + tl.sum(probs, 1)
        acc = acc * correction[:, None]
        v = _load(v_ptr + tile * v_stride + v_at, key < num_keys, d < V, MASKED, V < V_TILE)
        acc = tl.dot(probs.to(v.dtype), v, acc)
        peak = new_peak
    return acc, peak, total


@triton.jit
def mha_prefill_kernel(
    q_ptr,
    k_nope_ptr,
    k_pe_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    query_start_loc_ptr,
    key_start_loc_ptr,
    num_reqs,
    num_heads,
    scale_log2,
    q_stride,
    q_stride_head,
    k_nope_stride,
    k_nope_stride_head,
    k_pe_stride,
    v_stride,
    v_stride_head,
    P: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    P_TILE: tl.constexpr,
    R_TILE: tl.constexpr,
    V_TILE: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program a (slot, head), the last slots first: under a causal bound a request's last tile sees the most keys."""
    slot = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    request, tile = _find_tile(query_start_loc_ptr, num_reqs, slot, BLOCK_M)
    query_start = tl.load(query_start_loc_ptr + request).to(tl.int64)
    num_queries = (tl.load(query_start_loc_ptr + request + 1) - query_start).to(tl.int32)
    first_query = tile * BLOCK_M
    if first_query >= num_queries:
        return
    key_start = tl.load(key_start_loc_ptr + request).to(tl.int64)
    num_keys = (tl.load(key_start_loc_ptr + request + 1) - key_start).to(tl.int32)

    query = first_query + tl.arange(0, BLOCK_M)
    is_query = query < num_queries
    p, r, d = tl.arange(0, P_TILE), tl.arange(0, R_TILE), tl.arange(0, V_TILE)
    q_row_ptr = q_ptr + (query_start + query)[:, None] * q_stride + head * q_stride_head
    q_nope = _load(q_row_ptr + p[None, :], is_query, p < P, True, P < P_TILE)
    q_pe = _load(q_row_ptr + P + r[None, :], is_query, r < R, True, R < R_TILE)
    k_nope_ptr += key_start * k_nope_stride + head * k_nope_stride_head
    k_pe_ptr += key_start * k_pe_stride
    v_ptr += key_start * v_stride + head * v_stride_head

    end = num_keys
    num_unmasked = num_keys // BLOCK_N * BLOCK_N
    if CAUSAL:
        end = tl.minimum(num_keys, first_query + BLOCK_M)
        num_unmasked = (first_query + 1) // BLOCK_N * BLOCK_N
    acc = tl.zeros([BLOCK_M, V_TILE], tl.float32)
    peak = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    # fmt: off
    acc, peak, total = _attend(
        acc, peak, total, q_nope, q_pe, k_nope_ptr, k_pe_ptr, v_ptr, k_nope_stride, k_pe_stride, v_stride, query, scale_log2,
        0, num_unmasked, num_keys, P, R, V, P_TILE, R_TILE, V_TILE, BLOCK_N, False, CAUSAL,
    )
    acc, peak, total = _attend(
        acc, peak, total, q_nope, q_pe, k_nope_ptr, k_pe_ptr, v_ptr, k_nope_stride, k_pe_stride, v_stride, query, scale_log2,
        num_unmasked, end, num_keys, P, R, V, P_TILE, R_TILE, V_TILE, BLOCK_N, True, CAUSAL,
    )
    # fmt: on
    # Without keys: acc 0, total 0, peak -inf.
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    lse = (peak + tl.log2(tl.where(total == 0.0, 1.0, total))) / 1.4426950408889634
    at = (query_start + query) * num_heads + head
    tl.store(out_ptr + at[:, None] * V + d[None, :], out.to(out_ptr.dtype.element_ty), mask=is_query[:, None] & (d < V)[None, :])
    tl.store(lse_ptr + at, lse, mask=is_query)


class Tiling(NamedTuple):
    """Queries and keys of a tile, warps of a program, stages of its pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def shared_memory(self, qk_head_dim: int, v_head_dim: int) -> int:
        """Bytes of 16-bit tiles that a program holds: its queries, and keys and values of each stage."""
        return 2 * (self.block_m * qk_head_dim + self.num_stages * self.block_n * (qk_head_dim + v_head_dim))


# Best first; the last fits every GPU with bfloat16 for heads of up to 256.
TILINGS = (Tiling(128, 128, 8, 2), Tiling(128, 64, 8, 2), Tiling(64, 64, 4, 2), Tiling(64, 32, 4, 2), Tiling(32, 16, 4, 2))


def select_tiling(qk_head_dim: int, v_head_dim: int, shared_memory: int) -> Tiling:
    """The first whose tiles fit into the shared memory of a program, in bytes."""
    return next((tiling for tiling in TILINGS if tiling.shared_memory(qk_head_dim, v_head_dim) <= shared_memory), TILINGS[-1])


def mha_prefill(
    q: Tensor, k_nope: Tensor, k_pe: Tensor, v: Tensor, query_start_loc: Tensor, key_start_loc: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attention of a ragged batch on a GPU of compute capability 8.0 or more. Any strides between rows and heads, no copies, no host sync.

    Args:
        q: [T, h, P + R], bfloat16 or float16, the queries of request i at [query_start_loc[i], query_start_loc[i + 1]).
        k_nope, k_pe, v: [S, h, P], [S, R], [S, h, V] in the dtype of q; the keys of request i at [key_start_loc[i], key_start_loc[i + 1]).
        query_start_loc, key_start_loc: [num_reqs + 1] int32 on the device.
        scale: positive.
        causal: query j of a request sees its first j + 1 keys (there are as many keys as queries); else all.
    Returns:
        out [T, h, V] in the dtype of q, lse [T, h] float32 natural log; (0, -inf) for a request without keys.
    Source: FlashAttention-2.
    """
    num_tokens, num_heads, nope_dim = *q.shape[:2], k_nope.shape[-1]
    rope_dim, v_head_dim, num_reqs = k_pe.shape[-1], v.shape[-1], len(query_start_loc) - 1
    out = q.new_empty(num_tokens, num_heads, v_head_dim)
    lse = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=q.device)
    tile_dims = [max(16, triton.next_power_of_2(dim)) for dim in (nope_dim, rope_dim, v_head_dim)]
    tiling = select_tiling(tile_dims[0] + tile_dims[1], tile_dims[2], _shared_memory(q.device))
    mha_prefill_kernel[(num_tokens // tiling.block_m + num_reqs, num_heads)](
        q,
        k_nope,
        k_pe,
        v,
        out,
        lse,
        query_start_loc,
        key_start_loc,
        num_reqs,
        num_heads,
        scale * _LOG2_E,
        *q.stride()[:2],
        *k_nope.stride()[:2],
        k_pe.stride(0),
        *v.stride()[:2],
        P=nope_dim,
        R=rope_dim,
        V=v_head_dim,
        P_TILE=tile_dims[0],
        R_TILE=tile_dims[1],
        V_TILE=tile_dims[2],
        CAUSAL=causal,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    return out, lse


def _shared_memory(device: torch.device) -> int:
    """Bytes that a program may use; where Triton interprets, without a GPU, those on a Hopper GPU."""
    return int(triton.compiler.max_shared_mem(device.index)) if device.type == "cuda" else 232448
