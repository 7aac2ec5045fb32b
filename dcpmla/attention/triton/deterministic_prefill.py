"""Multi-head attention in a fixed order on GPUs; `deterministic_reference.prefill_deterministic` specifies it.

A program computes a tile of one request's queries for one head over a chunk of the keys, tile by tile from the chunk's
first position. Tiles of keys are the same for all queries, because chunks begin at multiples of a tile. Where some
queries of a tile do not see a key, its probability is zero and changes no bit of their sums.
"""

import torch
import triton
import triton.language as tl

from dcpmla.attention.backends.deterministic_reference import DeterministicPrefillCall, Sums
from dcpmla.attention.triton.device import describe, shared_memory
from dcpmla.attention.triton.prefill import select_tiling
from dcpmla.attention.triton.ragged import find_tile
from dcpmla.comm.kernels.merge_tree import LOG2_E


@triton.jit
def _attend(sums, queries, keys, span, BLOCK_N: tl.constexpr, MASKED: tl.constexpr):
    """Run online softmax, base 2, over some of a request's keys; return the new sums.

    Args:
        sums: Sum of values, peak and total so far.
        queries: q_nope, q_pe, the last key of the chunk that each query sees, and the scale times log2(e).
        keys: Descriptors of k_nope, k_pe and v, the head, and the request's first row and number of keys.
        span: First key of the chunk, and the end.
        MASKED: Whether some keys are past the request's end, or past a query's own position.
    """
    acc, peak, total = sums
    q_nope, q_pe, last, scale_log2 = queries
    k_nope_desc, k_pe_desc, v_desc, head, key_start, num_keys = keys
    P_TILE: tl.constexpr = k_nope_desc.block_shape[2]
    V_TILE: tl.constexpr = v_desc.block_shape[2]
    for begin in range(span[0], span[1], BLOCK_N):
        at = key_start + begin
        key = begin + tl.arange(0, BLOCK_N)
        k_nope = k_nope_desc.load([head, at, 0]).reshape(BLOCK_N, P_TILE)
        k_pe = k_pe_desc.load([at, 0])
        scores = tl.dot(q_nope, k_nope.T)
        scores = tl.dot(q_pe, k_pe.T, scores)
        if MASKED:
            scores = tl.where(key[None, :] <= last[:, None], scores, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * scale_log2)
        shift = tl.broadcast_to(-new_peak[:, None], scores.shape)
        # Explicit, because both forms of the loop must round alike.
        probs = tl.exp2(tl.fma(scores, tl.full(scores.shape, scale_log2, tl.float32), shift))
        correction = tl.exp2(peak - new_peak)
        total = tl.fma(total, correction, tl.sum(probs, 1))
        v = v_desc.load([head, at, 0]).reshape(BLOCK_N, V_TILE)
        if MASKED:
            # Rows past the request's end are not its own and may hold NaN, and 0 x NaN is NaN.
            v = tl.where((key < num_keys)[:, None], v, 0.0)
        acc = tl.dot(probs.to(v.dtype), v, acc * correction[:, None])
        peak = new_peak
    return acc, peak, total


@triton.jit(do_not_specialize=["num_reqs"])
def deterministic_prefill_kernel(
    q_ptr,
    k_nope_desc,
    k_pe_desc,
    v_desc,
    out_ptr,
    lse_ptr,
    acc_ptr,
    peak_ptr,
    total_ptr,
    query_start_loc_ptr,
    query_position_ptr,
    key_start_loc_ptr,
    key_position_ptr,
    num_reqs,
    num_heads,
    scale_log2,
    q_stride,
    q_stride_head,
    P: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    P_TILE: tl.constexpr,
    R_TILE: tl.constexpr,
    V_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add a chunk's keys to the sums of one tile of queries of one head; one program per (tile, head).

    A request's sums begin anew if its first keys are in the chunk. If its last keys are, results are stored instead.
    """
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    request, tile = find_tile(query_start_loc_ptr, num_reqs, program, BLOCK_M)
    query_start = tl.load(query_start_loc_ptr + request).to(tl.int64)
    num_queries = (tl.load(query_start_loc_ptr + request + 1) - query_start).to(tl.int32)
    first_query = tile * BLOCK_M
    key_start = tl.load(key_start_loc_ptr + request)
    num_keys = tl.load(key_start_loc_ptr + request + 1) - key_start
    # Programs of rows before the first request have tiles below 0.
    if (tile < 0) | (first_query >= num_queries) | (num_keys == 0):
        return
    first_key = tl.load(key_position_ptr + request)
    # Query number i sees the keys of the chunk up to number i + offset.
    offset = tl.load(query_position_ptr + request) - first_key

    query = first_query + tl.arange(0, BLOCK_M)
    is_query = query < num_queries
    p, r, d = tl.arange(0, P_TILE), tl.arange(0, R_TILE), tl.arange(0, V_TILE)
    q_at = q_ptr + (query_start + query)[:, None] * q_stride + head.to(tl.int64) * q_stride_head
    q_nope = tl.load(q_at + p[None, :], mask=is_query[:, None] & (p < P)[None, :], other=0.0)
    q_pe = tl.load(q_at + P + r[None, :], mask=is_query[:, None] & (r < R)[None, :], other=0.0)

    row = (query_start + query) * num_heads + head
    at, mask = row[:, None] * V + d[None, :], is_query[:, None] & (d < V)[None, :]
    acc = tl.zeros([BLOCK_M, V_TILE], tl.float32)
    peak = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if first_key > 0:
        acc = tl.load(acc_ptr + at, mask=mask, other=0.0)
        peak = tl.load(peak_ptr + row, mask=is_query, other=0.0)
        total = tl.load(total_ptr + row, mask=is_query, other=0.0)

    end = tl.minimum(num_keys, first_query + BLOCK_M + offset)
    num_unmasked = tl.maximum(tl.minimum(num_keys, first_query + offset + 1), 0) // BLOCK_N * BLOCK_N
    sums, queries = (acc, peak, total), (q_nope, q_pe, query + offset, scale_log2)
    keys = (k_nope_desc, k_pe_desc, v_desc, head, key_start, num_keys)
    for part in tl.static_range(2):
        span = (num_unmasked, end) if part else (0, num_unmasked)
        sums = _attend(sums, queries, keys, span, BLOCK_N, part == 1)
    acc, peak, total = sums
    if num_keys == num_queries + offset:
        tl.store(out_ptr + at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
        tl.store(lse_ptr + row, (peak + tl.log2(total)) / LOG2_E, mask=is_query)
    else:
        tl.store(acc_ptr + at, acc, mask=mask)
        tl.store(peak_ptr + row, peak, mask=is_query)
        tl.store(total_ptr + row, total, mask=is_query)


def run(call: DeterministicPrefillCall, out: torch.Tensor, lse: torch.Tensor, sums: Sums) -> None:
    """Compute `deterministic.attend_to_chunk` in bfloat16 or float16, without a host sync.

    Tiles depend on the widths of heads and on the GPU alone. Keys and values are read in place if their rows are
    aligned to 16 bytes, else they are copied first.
    """
    q, k_nope, k_pe, v = call.q, call.k_nope, call.k_pe, call.v
    (num_tokens, num_heads, _), num_reqs = q.shape, len(call.query_start_loc) - 1
    dims = k_nope.shape[-1], k_pe.shape[-1], v.shape[-1]
    tiles = p_tile, r_tile, v_tile = tuple(max(16, triton.next_power_of_2(dim)) for dim in dims)
    tiling = select_tiling(p_tile + r_tile, v_tile, shared_memory(q.device))
    deterministic_prefill_kernel[(num_tokens // tiling.block_m + num_reqs, num_heads)](
        q,
        describe(k_nope.transpose(0, 1), [1, tiling.block_n, p_tile]),
        describe(k_pe, [tiling.block_n, r_tile]),
        describe(v.transpose(0, 1), [1, tiling.block_n, v_tile]),
        out,
        lse,
        *sums,
        call.query_start_loc,
        call.query_position,
        call.key_start_loc,
        call.key_position,
        num_reqs,
        num_heads,
        call.softmax_scale * LOG2_E.value,
        *q.stride()[:2],
        *dims,
        *tiles,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        enable_fp_fusion=False,  # a compiler may fuse in one variant and not in another
    )
