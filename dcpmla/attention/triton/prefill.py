"""Multi-head attention of a ragged batch of prefill tokens as one Triton kernel; `reference.mha_prefill` specifies it.

A program computes a tile of one request's queries for one head over all keys that they see (FlashAttention-2); a bit
mask excludes single keys. The rope part of a key is the same for all heads and is read in place, so keys are never
assembled in memory.

Keys and values are read through descriptors: by TMA on Hopper, which fills with zeros past the end of a tensor; on
older GPUs Triton turns them into pointers.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dcpmla.attention.backends.calls import PrefillCall
from dcpmla.attention.triton.device import describe, shared_memory
from dcpmla.attention.triton.ragged import find_tile

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # lowest float32
SIGN_BIT, MINUS_INF = tl.constexpr(-(1 << 31)), tl.constexpr(-(1 << 23))  # bits of float32


@triton.jit
def _limit(mask_at, num_words, begin, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return upper limits of scores [BLOCK_M, BLOCK_N] of the keys from begin on: inf where a bit is set, else -inf.

    mask_at points to each query's first word. Limits rather than booleans, which LLVM would pack into words and unpack
    again.
    """
    column = tl.arange(0, BLOCK_N)
    if BLOCK_N < 32:
        column += begin % 32
    words = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    # Each thread loads the words of its own rows; the word of each column is known at compile time.
    for part in tl.static_range((BLOCK_N + 31) // 32):
        word = tl.load(mask_at + tl.minimum(begin // 32 + part, num_words - 1))
        words = tl.where((column // 32 == part)[None, :], word[:, None], words)
    sign = words << (31 - column % 32)[None, :]
    return ((sign & SIGN_BIT) ^ MINUS_INF).to(tl.float32, bitcast=True)


@triton.jit
def _attend(
    sums,
    queries,
    keys,
    mask_at,
    num_words,
    span,
    R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Run online softmax, base 2, over some of a request's keys; return the new sums.

    Args:
        sums: Output, peak and total so far.
        queries: q_nope, q_pe, their positions, and the scale of scores times log2(e).
        keys: Descriptors of k_nope, k_pe and v, the head, and the request's first row and number of keys.
        mask_at, num_words: Each query's first word, and the number of words; the first is None without a mask.
        span: First key, and the end.
        R: Width of the rope part; without one q_pe and the descriptor of k_pe are not read.
        MASKED: Whether some keys are past the request's end, or past a query's causal bound.
    """
    acc, peak, total = sums
    q_nope, q_pe, query, scale_log2 = queries
    k_nope_desc, k_pe_desc, v_desc, head, key_start, num_keys = keys
    P_TILE: tl.constexpr = k_nope_desc.block_shape[2]
    V_TILE: tl.constexpr = v_desc.block_shape[2]
    for begin in range(span[0], span[1], BLOCK_N):
        at = key_start + begin
        key = begin + tl.arange(0, BLOCK_N)
        k_nope = k_nope_desc.load([head, at, 0]).reshape(BLOCK_N, P_TILE)
        scores = tl.dot(q_nope, k_nope.T)
        if R > 0:
            scores = tl.dot(q_pe, k_pe_desc.load([at, 0]).T, scores)
        if MASKED:
            visible = (key < num_keys)[None, :]
            if CAUSAL:
                visible = visible & (key[None, :] <= query[:, None])
            scores = tl.where(visible, scores, -float("inf"))
        if mask_at is not None:
            scores = tl.minimum(scores, _limit(mask_at, num_words, begin, scores.shape[0], BLOCK_N))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * scale_log2)
        probs = tl.exp2(scores * scale_log2 - new_peak[:, None])
        correction = tl.exp2(peak - new_peak)
        total = total * correction + tl.sum(probs, 1)
        acc = acc * correction[:, None]
        v = v_desc.load([head, at, 0]).reshape(BLOCK_N, V_TILE)
        if MASKED:
            # Rows past the request's end are not its own and may hold NaN, and 0 x NaN is NaN.
            v = tl.where((key < num_keys)[:, None], v, 0.0)
        acc = tl.dot(probs.to(v.dtype), v, acc)
        peak = new_peak
    return acc, peak, total


@triton.jit(do_not_specialize=["num_reqs", "num_words", "window"])
def mha_prefill_kernel(
    q_ptr,
    k_nope_desc,
    k_pe_desc,
    v_desc,
    mask_ptr,
    out_ptr,
    lse_ptr,
    query_start_loc_ptr,
    key_start_loc_ptr,
    num_reqs,
    num_heads,
    num_words,
    window,
    scale_log2,
    q_stride,
    q_stride_head,
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
    """Compute one tile of queries of one head; one program per (tile, head).

    The last tiles run first: under a causal bound a request's last tile sees the most keys. With a window, a tile
    begins at the first key that its first query sees.
    """
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    request, tile = find_tile(query_start_loc_ptr, num_reqs, program, BLOCK_M)
    query_start = tl.load(query_start_loc_ptr + request).to(tl.int64)
    num_queries = (tl.load(query_start_loc_ptr + request + 1) - query_start).to(tl.int32)
    first_query = tile * BLOCK_M
    if first_query >= num_queries:
        return
    key_start = tl.load(key_start_loc_ptr + request)
    num_keys = tl.load(key_start_loc_ptr + request + 1) - key_start

    query = first_query + tl.arange(0, BLOCK_M)
    is_query = query < num_queries
    p, d = tl.arange(0, P_TILE), tl.arange(0, V_TILE)
    q_at = q_ptr + (query_start + query)[:, None] * q_stride + head.to(tl.int64) * q_stride_head
    q_nope = tl.load(q_at + p[None, :], mask=is_query[:, None] & (p < P)[None, :], other=0.0)
    if R == 0:
        q_pe, k_pe_desc = q_nope, k_nope_desc
    else:
        r = tl.arange(0, R_TILE)
        q_pe = tl.load(q_at + P + r[None, :], mask=is_query[:, None] & (r < R)[None, :], other=0.0)

    begin, end = 0, num_keys
    num_unmasked = num_keys // BLOCK_N * BLOCK_N
    if CAUSAL:
        end = tl.minimum(num_keys, first_query + BLOCK_M)
        num_unmasked = (first_query + 1) // BLOCK_N * BLOCK_N
        if window is not None:
            begin = tl.maximum(first_query - window + 1, 0) // BLOCK_N * BLOCK_N
    acc = tl.zeros([BLOCK_M, V_TILE], tl.float32)
    peak = tl.full([BLOCK_M], -float("inf"), tl.float32)
    mask_at = None
    if mask_ptr is not None:
        mask_at = mask_ptr + (query_start + tl.minimum(query, num_queries - 1)) * num_words
        peak = tl.full([BLOCK_M], LOWEST, tl.float32)  # a query may see none of the first keys, and -inf - -inf is NaN
    total = tl.zeros([BLOCK_M], tl.float32)
    sums, queries = (acc, peak, total), (q_nope, q_pe, query, scale_log2)
    keys = (k_nope_desc, k_pe_desc, v_desc, head, key_start, num_keys)
    for part in tl.static_range(2):
        span = (num_unmasked, end) if part else (begin, num_unmasked)
        sums = _attend(sums, queries, keys, mask_at, num_words, span, R, BLOCK_N, CAUSAL, part == 1)
    acc, peak, total = sums
    if mask_ptr is not None:
        peak = tl.where(total == 0.0, -float("inf"), peak)
    # Without keys: acc 0, total 0, peak -inf.
    divisor = tl.where(total == 0.0, 1.0, total)
    out = (acc / divisor[:, None]).to(out_ptr.dtype.element_ty)
    lse = (peak + tl.log2(divisor)) / LOG2_E
    at = (query_start + query) * num_heads + head
    tl.store(out_ptr + at[:, None] * V + d[None, :], out, mask=is_query[:, None] & (d < V)[None, :])
    tl.store(lse_ptr + at, lse, mask=is_query)


class Tiling(NamedTuple):
    """A tiling: queries and keys of a tile, warps of a program, stages of its pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def shared_memory(self, qk_tile: int, v_tile: int) -> int:
        """Return the bytes that a program holds: its queries, each stage's keys and values, a mask's bits, barriers."""
        rows = 2 * (self.block_m * qk_tile + self.num_stages * self.block_n * (qk_tile + v_tile))
        return rows + self.block_m * self.block_n // 8 + 1024


# Best first; the last fits every GPU that computes in bfloat16.
TILINGS = (
    Tiling(128, 128, 8, 2),
    Tiling(128, 64, 8, 2),
    Tiling(64, 64, 4, 2),
    Tiling(64, 32, 4, 2),
    Tiling(32, 16, 4, 2),
)


def select_tiling(qk_tile: int, v_tile: int, shared_memory: int) -> Tiling:
    """Select the first tiling that fits into a program's shared memory, in bytes; tile widths are powers of 2."""
    return next((tiling for tiling in TILINGS if tiling.shared_memory(qk_tile, v_tile) <= shared_memory), TILINGS[-1])


def run(call: PrefillCall) -> tuple[Tensor, Tensor]:
    """Compute a `PrefillCall` of bfloat16 or float16 on a GPU of compute capability 8.0 or more, without a host sync.

    Keys and values are read in place if their rows are aligned to 16 bytes, else they are copied first.

    Source: FlashAttention-2.
    """
    q, k_nope, k_pe, v, mask = call.q, call.k_nope, call.k_pe, call.v, call.mask
    queries, keys = call.queries, call.keys
    (num_tokens, num_heads, _), num_reqs = q.shape, len(queries.start_loc) - 1
    dims = k_nope.shape[-1], k_pe.shape[-1], v.shape[-1]
    tiles = p_tile, r_tile, v_tile = tuple(max(16, triton.next_power_of_2(dim)) for dim in dims)
    has_rope = dims[1] > 0
    tiling = select_tiling(p_tile + (r_tile if has_rope else 0), v_tile, shared_memory(q.device))
    out = q.new_empty(num_tokens, num_heads, dims[2])
    lse = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=q.device)
    mha_prefill_kernel[(num_tokens // tiling.block_m + num_reqs, num_heads)](
        q,
        describe(k_nope.transpose(0, 1), [1, tiling.block_n, p_tile]),
        describe(k_pe, [tiling.block_n, r_tile]) if has_rope else None,
        describe(v.transpose(0, 1), [1, tiling.block_n, v_tile]),
        mask,
        out,
        lse,
        queries.start_loc,
        keys.start_loc,
        num_reqs,
        num_heads,
        None if mask is None else mask.shape[1],
        call.window,
        call.softmax_scale * LOG2_E.value,
        *q.stride()[:2],
        *dims,
        *tiles,
        CAUSAL=call.causal,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    return out, lse
