"""Multi-head attention of prefill tokens for Hopper GPUs; `reference.mha_prefill` specifies it.

A program computes a tile of one request's queries for one head (FlashAttention-3). One warp brings queries, keys and
values into shared memory by TMA; two groups of four warps, the consumers, attend from half of the queries each. A
consumer starts the scores of a tile of keys together with the product of the probabilities and values of the tile
before, and computes the softmax of the one while the tensor cores work on the other.

The last keys come first: only their tile has keys past a request's end or a causal bound, so that no later step
compares positions. A bit mask of selected keys applies to every tile (`mask`); its words are loaded one tile ahead. The
rope part of a key is the same for all heads and is read in place.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dcpmla.attention.calls import PrefillCall
from dcpmla.attention.hopper.compat import aggregate, barrier, reinterpret, tma_load
from dcpmla.attention.hopper.mask import load_words, open_mask, select_scores
from dcpmla.attention.hopper.pipeline import LN2, LOG2E, allocate_mbarriers, exp2, stage_of
from dcpmla.attention.triton import prefill as portable

find_tile = gluon.jit(portable.find_tile.fn)

NOPE, ROPE, VALUE = gl.constexpr(128), gl.constexpr(64), gl.constexpr(128)
QUERIES = gl.constexpr(128)  # queries per tile
ROWS = gl.constexpr(64)  # queries of a consumer
CONSUMERS = gl.constexpr(256)  # threads of both consumers
KEYS = gl.constexpr(128)  # keys per tile
NUM_STAGES = gl.constexpr(2)  # stages of keys and values: shared memory has room for no more
CLEARED = gl.constexpr(16)  # rows cleared at a time
LOWEST = gl.constexpr(-3.4028234663852886e38)  # the least finite float32

TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, PRODUCT.value, 2))
ROW = gl.constexpr(gl.SliceLayout(1, PRODUCT.value))


@aggregate
class Buffers:
    """Tiles in shared memory."""

    q_nope: gl.shared_memory_descriptor  # [2, ROWS, NOPE], later the output
    q_pe: gl.shared_memory_descriptor  # [2, ROWS, ROPE]
    k_nope: gl.shared_memory_descriptor  # [stages, KEYS, NOPE]
    k_pe: gl.shared_memory_descriptor  # [stages, KEYS, ROPE]
    v: gl.shared_memory_descriptor  # [stages, KEYS, VALUE]


@aggregate
class Barriers:
    """mbarriers for the tiles of `Buffers`: filled, and free again.

    Each thread of the consumers frees a stage by itself. One thread for all would have to wait for a barrier of its
    warps first, which takes up to 3 % of the kernel's time.
    """

    q_ready: gl.shared_memory_descriptor
    k_ready: gl.shared_memory_descriptor  # [stages]
    k_free: gl.shared_memory_descriptor
    v_ready: gl.shared_memory_descriptor
    v_free: gl.shared_memory_descriptor


@aggregate
class Work:
    """A program's queries and the keys that any of its queries sees. Both may be none."""

    head: gl.tensor
    first_row: gl.tensor  # row of the first query in q
    num_queries: gl.tensor  # queries of the request from there on; a program takes at most QUERIES
    first_query: gl.tensor  # index of the first query in its request
    key_start: gl.tensor  # row of the first key in k_nope, k_pe and v
    num_keys: gl.tensor
    num_tiles: gl.tensor
    is_causal: gl.constexpr


@gluon.jit
def _find_work(query_start_loc_ptr, key_start_loc_ptr, num_reqs, num_heads, IS_CAUSAL: gl.constexpr):
    """Return the program's `Work`. A request's last tile, which sees the most keys under a causal bound, runs first."""
    head = gl.program_id(2) * gl.num_programs(0) + gl.program_id(0)
    program = gl.num_programs(1) - 1 - gl.program_id(1)
    request, tile = find_tile(query_start_loc_ptr, num_reqs, program, QUERIES)
    first_query = tile * QUERIES
    first_row = gl.load(query_start_loc_ptr + request) + first_query
    num_queries = gl.where(head < num_heads, gl.load(query_start_loc_ptr + request + 1) - first_row, 0)
    key_start = gl.load(key_start_loc_ptr + request)
    num_keys = gl.where(num_queries > 0, gl.load(key_start_loc_ptr + request + 1) - key_start, 0)
    if IS_CAUSAL:
        num_keys = gl.minimum(num_keys, first_query + QUERIES)
    num_tiles = gl.cdiv(num_keys, KEYS)
    return Work(head, first_row, num_queries, first_query, key_start, num_keys, num_tiles, IS_CAUSAL)


@gluon.jit
def _produce(descs, strides, buffers, barriers, work):
    """Copy the queries, then the tiles of keys and values, the last ones first, in the order of their use."""
    q_nope_desc, q_pe_desc, k_nope_desc, k_pe_desc, v_desc = descs
    q_stride_head, k_stride_head, v_stride_head = strides
    if work.num_tiles > 0:
        mbarrier.expect(barriers.q_ready, QUERIES * (NOPE + ROPE) * 2)
        for group in gl.static_range(2):
            row, column = work.first_row + group * ROWS, work.head * q_stride_head
            tma_load(q_nope_desc, [row, column], barriers.q_ready, buffers.q_nope.index(group))
            tma_load(q_pe_desc, [row, column + NOPE], barriers.q_ready, buffers.q_pe.index(group))
        for step in range(0, work.num_tiles + 1):
            if step < work.num_tiles:
                stage, phase = step % NUM_STAGES, (step // NUM_STAGES) & 1
                row = work.key_start + (work.num_tiles - 1 - step) * KEYS
                mbarrier.wait(barriers.k_free.index(stage), phase ^ 1)
                ready = barriers.k_ready.index(stage)
                mbarrier.expect(ready, KEYS * (NOPE + ROPE) * 2)
                tma_load(k_nope_desc, [row, work.head * k_stride_head], ready, buffers.k_nope.index(stage))
                tma_load(k_pe_desc, [row, 0], ready, buffers.k_pe.index(stage))
            if step > 0:  # the values of the tile before, as the consumers multiply them
                stage, phase = (step - 1) % NUM_STAGES, ((step - 1) // NUM_STAGES) & 1
                row = work.key_start + (work.num_tiles - step) * KEYS
                mbarrier.wait(barriers.v_free.index(stage), phase ^ 1)
                ready = barriers.v_ready.index(stage)
                mbarrier.expect(ready, KEYS * VALUE * 2)
                tma_load(v_desc, [row, work.head * v_stride_head], ready, buffers.v.index(stage))


@gluon.jit
def _start_scores(group: gl.constexpr, buffers, barriers, step):
    """Start the queries' products with a tile of keys, asynchronous; return the scores in the making."""
    stage = step % NUM_STAGES
    mbarrier.wait(barriers.k_ready.index(stage), (step // NUM_STAGES) & 1)
    scores = gl.zeros([ROWS, KEYS], gl.float32, PRODUCT)
    nope, rope = stage_of(buffers.k_nope, stage).permute((1, 0)), stage_of(buffers.k_pe, stage).permute((1, 0))
    scores = warpgroup_mma(stage_of(buffers.q_nope, group), nope, scores, is_async=True)
    return warpgroup_mma(stage_of(buffers.q_pe, group), rope, scores, is_async=True)


@gluon.jit
def _start_values(probs, buffers, step, acc):
    """Start adding a tile's probabilities times its values to acc, asynchronous; return acc in the making."""
    return warpgroup_mma(probs, stage_of(buffers.v, step % NUM_STAGES), acc, is_async=True)


@gluon.jit
def _softmax(scores, peak, total, scale_log2, dtype: gl.constexpr):
    """Take a tile's step of the online softmax, base 2.

    Returns the probabilities as an operand, the factor of what was summed before, and the new peak and total.
    """
    new_peak = gl.maximum(peak, gl.max(scores, 1) * scale_log2)
    probs = exp2(scores * scale_log2 - gl.expand_dims(new_peak, 1))
    factor = exp2(peak - new_peak)
    total = total * factor + gl.sum(probs, 1)
    return gl.convert_layout(probs.to(dtype), WEIGHTS), factor, new_peak, total


@gluon.jit
def _clear_past(values, num_keys):
    """Zero the rows of values [KEYS, VALUE] past the last key: they may hold NaN, and 0 x NaN is NaN.

    Each consumer does so for itself: what the other one reads meanwhile is the same or zero already.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    num_parts: gl.constexpr = KEYS // CLEARED
    # A half has 64 columns, the width of a swizzle.
    parts = reinterpret(values, values.dtype, [2 * num_parts, CLEARED, VALUE // 2], TILE)
    for part in range(num_keys // CLEARED, num_parts):
        row = part * CLEARED + gl.arange(0, CLEARED, layout=gl.SliceLayout(1, layout))
        for half in gl.static_range(2):
            rows = parts.index(half * num_parts + part)
            rows.store(gl.where(gl.expand_dims(row, 1) < num_keys, rows.load(layout), 0.0))
    fence_async_shared()
    barrier()


@gluon.jit
def _store(group: gl.constexpr, acc, lse, buffer, out_ptr, lse_ptr, num_heads, work):
    """Store a consumer's rows of the output, through shared memory: so a warp writes whole rows."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    barrier()  # the buffer holds queries, which other warps' products may still read
    buffer.store(acc.to(buffer.dtype))
    barrier()
    first_row = work.first_row + group * ROWS
    num_rows = work.num_queries - group * ROWS
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, VALUE, layout=gl.SliceLayout(0, layout))
    at = (first_row + row).to(gl.int64) * num_heads + work.head
    at = out_ptr + gl.expand_dims(at, 1) * VALUE + gl.expand_dims(column, 0)
    gl.store(at, buffer.load(layout), mask=gl.expand_dims(row < num_rows, 1))
    row = gl.arange(0, ROWS, layout=ROW)
    gl.store(lse_ptr + (first_row + row).to(gl.int64) * num_heads + work.head, lse, mask=row < num_rows)


@gluon.jit
def _consume(
    group: gl.constexpr, buffers, barriers, out_ptr, lse_ptr, mask_ptr, num_words, num_heads, scale_log2, work
):
    """Attend from half of the queries."""
    dtype: gl.constexpr = buffers.v.dtype
    acc = gl.zeros([ROWS, VALUE], gl.float32, PRODUCT)
    peak = gl.full([ROWS], -float("inf"), gl.float32, ROW)
    total = gl.zeros([ROWS], gl.float32, ROW)
    if mask_ptr is not None:
        peak = gl.full([ROWS], LOWEST, gl.float32, ROW)  # a query may select none of a tile, and -inf - -inf is NaN
        first, num_rows = work.first_row + group * ROWS, work.num_queries - group * ROWS
        mask = open_mask(mask_ptr, num_words, first, num_rows, ROWS, KEYS, PRODUCT)
    if work.num_tiles > 0:
        if mask_ptr is not None:
            words = load_words(mask, work.num_tiles - 1, PRODUCT)
        mbarrier.wait(barriers.q_ready, 0)
        scores = warpgroup_mma_wait(0, deps=[_start_scores(group, buffers, barriers, 0)])
        async_copy.mbarrier_arrive(barriers.k_free.index(0), increment_count=False)
        first_key = (work.num_tiles - 1) * KEYS
        num_seen = gl.full([ROWS], work.num_keys, gl.int32, ROW)
        if work.is_causal:
            query = work.first_query + group * ROWS + gl.arange(0, ROWS, layout=ROW)
            num_seen = gl.minimum(num_seen, query + 1)
        key = first_key + gl.arange(0, KEYS, layout=gl.SliceLayout(0, PRODUCT))
        scores = gl.where(gl.expand_dims(key, 0) < gl.expand_dims(num_seen, 1), scores, -float("inf"))
        if mask_ptr is not None:
            scores = select_scores(scores, words, mask)
            words = load_words(mask, work.num_tiles - 2, PRODUCT)
        probs, factor, peak, total = _softmax(scores, peak, total, scale_log2, dtype)
        mbarrier.wait(barriers.v_ready.index(0), 0)
        if first_key + KEYS > work.num_keys:
            _clear_past(buffers.v.index(0), work.num_keys - first_key)
        for step in range(1, work.num_tiles):
            scores = _start_scores(group, buffers, barriers, step)
            acc = _start_values(probs, buffers, step - 1, acc)
            scores = warpgroup_mma_wait(1, deps=[scores])
            async_copy.mbarrier_arrive(barriers.k_free.index(step % NUM_STAGES), increment_count=False)
            if mask_ptr is not None:
                scores = select_scores(scores, words, mask)
                words = load_words(mask, work.num_tiles - 2 - step, PRODUCT)
            next_probs, factor, peak, total = _softmax(scores, peak, total, scale_log2, dtype)
            # For the next step's product. The assembler moves no wait for products up past this one, above the softmax.
            mbarrier.wait(barriers.v_ready.index(step % NUM_STAGES), (step // NUM_STAGES) & 1)
            acc, probs = warpgroup_mma_wait(0, deps=[acc, probs])
            async_copy.mbarrier_arrive(barriers.v_free.index((step - 1) % NUM_STAGES), increment_count=False)
            acc = acc * gl.expand_dims(factor, 1)
            probs = next_probs
        acc = warpgroup_mma_wait(0, deps=[_start_values(probs, buffers, work.num_tiles - 1, acc)])
    if mask_ptr is not None:
        peak = gl.where(total == 0.0, -float("inf"), peak)
    divisor = gl.where(total == 0.0, 1.0, total)  # without keys: acc 0, total 0, peak -inf
    acc = acc * gl.expand_dims(1.0 / divisor, 1)
    lse = (peak + gl.log2(divisor)) * LN2
    _store(group, acc, lse, buffers.q_nope.index(group), out_ptr, lse_ptr, num_heads, work)


@gluon.jit(do_not_specialize=["num_reqs", "num_heads", "num_words"])
def prefill_kernel(
    q_nope_desc,
    q_pe_desc,
    k_nope_desc,
    k_pe_desc,
    v_desc,
    out_ptr,
    lse_ptr,
    mask_ptr,
    query_start_loc_ptr,
    key_start_loc_ptr,
    num_reqs,
    num_heads,
    num_words,
    q_stride_head,
    k_stride_head,
    v_stride_head,
    scale_log2,
    IS_CAUSAL: gl.constexpr,
):
    """Compute one tile of queries of one head. The grid is (heads side by side, tiles, groups of heads).

    Args:
        q_nope_desc, .., v_desc: Rows [N, columns of all heads].
        mask_ptr: Words of the mask [T, num_words]; both are None without a mask.
        q_stride_head, k_stride_head, v_stride_head: Columns from one head to the next.
        scale_log2: Softmax scale times log2(e).
    """
    dtype: gl.constexpr = v_desc.dtype
    buffers = Buffers(
        gl.allocate_shared_memory(dtype, [2, ROWS, NOPE], TILE),
        gl.allocate_shared_memory(dtype, [2, ROWS, ROPE], TILE),
        gl.allocate_shared_memory(dtype, [NUM_STAGES, KEYS, NOPE], TILE),
        gl.allocate_shared_memory(dtype, [NUM_STAGES, KEYS, ROPE], TILE),
        gl.allocate_shared_memory(dtype, [NUM_STAGES, KEYS, VALUE], TILE),
    )
    barriers = Barriers(
        allocate_mbarriers(1, 1).index(0),
        allocate_mbarriers(NUM_STAGES, 1),
        allocate_mbarriers(NUM_STAGES, CONSUMERS),
        allocate_mbarriers(NUM_STAGES, 1),
        allocate_mbarriers(NUM_STAGES, CONSUMERS),
    )
    fence_async_shared()
    work = _find_work(query_start_loc_ptr, key_start_loc_ptr, num_reqs, num_heads, IS_CAUSAL)
    descs = (q_nope_desc, q_pe_desc, k_nope_desc, k_pe_desc, v_desc)
    strides = (q_stride_head, k_stride_head, v_stride_head)
    gl.warp_specialize(
        [
            (_consume, (0, buffers, barriers, out_ptr, lse_ptr, mask_ptr, num_words, num_heads, scale_log2, work)),
            (_consume, (1, buffers, barriers, out_ptr, lse_ptr, mask_ptr, num_words, num_heads, scale_log2, work)),
            (_produce, (descs, strides, buffers, barriers, work)),
        ],
        [4, 1],
        [240, 24],
    )


def run(call: PrefillCall) -> tuple[Tensor, Tensor]:
    """Compute a `PrefillCall` in one launch, without a host sync, for the calls that `backends` admits.

    Source: FlashAttention-3.
    """
    q, queries = call.q, call.queries
    num_tokens, num_heads, _ = q.shape
    out = q.new_empty(num_tokens, num_heads, VALUE.value)
    lse = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=q.device)
    if num_tokens == 0:
        return out, lse
    num_reqs = len(queries.start_loc) - 1
    # Programs that read the same keys are neighbours, which takes up to 5 % less time where power is the limit. Under
    # a causal bound those of the last head alone would leave multiprocessors idle.
    side_by_side = 2 if call.causal else 1
    grid = side_by_side, num_tokens // QUERIES.value + num_reqs, triton.cdiv(num_heads, side_by_side)
    prefill_kernel[grid](
        _describe(q, ROWS.value, NOPE.value),
        _describe(q, ROWS.value, ROPE.value),
        _describe(call.k_nope, KEYS.value, NOPE.value),
        _describe(call.k_pe[:, None], KEYS.value, ROPE.value),
        _describe(call.v, KEYS.value, VALUE.value),
        out,
        lse,
        call.mask,
        queries.start_loc,
        call.keys.start_loc,
        num_reqs,
        num_heads,
        None if call.mask is None else call.mask.shape[1],
        q.stride(1),
        call.k_nope.stride(1),
        call.v.stride(1),
        call.scale * LOG2E.value,
        IS_CAUSAL=call.causal,
        num_warps=4,
    )
    return out, lse


def _describe(rows: Tensor, num_rows: int, num_columns: int) -> TensorDescriptor:
    """Describe rows [N, h, D] for TMA as a matrix of the columns of all heads, in tiles [num_rows, num_columns]."""
    num_heads, width = rows.shape[1:]
    shape = [len(rows), (num_heads - 1) * rows.stride(1) + width]
    return TensorDescriptor(rows, shape, [rows.stride(0), 1], [num_rows, num_columns], TILE.value)
