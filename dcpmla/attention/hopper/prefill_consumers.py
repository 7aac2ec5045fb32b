"""A consumer of a prefill program: attention from half of the tile's queries."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dcpmla.attention.hopper.compat import barrier, reinterpret
from dcpmla.attention.hopper.pipeline import LN2, exp2
from dcpmla.attention.hopper.prefill_mask import load_words, open_mask, select_scores
from dcpmla.attention.hopper.prefill_pipeline import KEYS, NUM_STAGES, PRODUCT, ROW, ROWS, TILE, VALUE
from dcpmla.attention.hopper.stage_ring import await_ready, free_at, stage_of

CLEARED = gl.constexpr(16)  # rows cleared at a time
LOWEST = gl.constexpr(-3.4028234663852886e38)  # the lowest finite float32
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, PRODUCT.value, 2))


@gluon.jit
def start_scores(group: gl.constexpr, buffers, barriers, step):
    """Start the queries' asynchronous products with a tile of keys; return the pending scores."""
    stage = await_ready(barriers.keys, step)
    scores = gl.zeros([ROWS, KEYS], gl.float32, PRODUCT)
    nope, rope = stage_of(buffers.k_nope, stage).permute((1, 0)), stage_of(buffers.k_pe, stage).permute((1, 0))
    scores = warpgroup_mma(stage_of(buffers.q_nope, group), nope, scores, is_async=True)
    return warpgroup_mma(stage_of(buffers.q_pe, group), rope, scores, is_async=True)


@gluon.jit
def start_values(probs, buffers, step, acc):
    """Start the asynchronous addition of a tile's probabilities times values to acc; return the pending acc."""
    return warpgroup_mma(probs, stage_of(buffers.v, step % NUM_STAGES), acc, is_async=True)


@gluon.jit
def softmax(scores, peak, total, scale_log2, dtype: gl.constexpr):
    """Take a tile's step of the online softmax, base 2.

    Returns the probabilities as an operand, the factor of the sums so far, and the new peak and total.
    """
    new_peak = gl.maximum(peak, gl.max(scores, 1) * scale_log2)
    scales = gl.full([ROWS, KEYS], scale_log2, gl.float32, PRODUCT)
    # Explicit multiply-adds, because kernels in a fixed order are compiled without any other.
    probs = exp2(gl.fma(scores, scales, gl.expand_dims(-new_peak, 1).broadcast_to([ROWS, KEYS])))
    factor = exp2(peak - new_peak)
    total = gl.fma(total, factor, gl.sum(probs, 1))
    return gl.convert_layout(probs.to(dtype), WEIGHTS), factor, new_peak, total


@gluon.jit
def clear_past(values, num_keys):
    """Zero the rows of values [KEYS, VALUE] past the last key: they may hold NaN, and 0 x NaN is NaN.

    Both consumers do so: rewriting a row keeps its values or makes them zero, so the other consumer may read it.
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
def store_rows(group: gl.constexpr, acc, lse, buffer, out_ptr, lse_ptr, num_heads, work):
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
def consume(group: gl.constexpr, buffers, barriers, out_ptr, lse_ptr, mask_ptr, num_words, num_heads, scale_log2, work):
    """Attend from half of the queries."""
    dtype: gl.constexpr = buffers.v.dtype
    acc = gl.zeros([ROWS, VALUE], gl.float32, PRODUCT)
    peak = gl.full([ROWS], -float("inf"), gl.float32, ROW)
    total = gl.zeros([ROWS], gl.float32, ROW)
    if mask_ptr is not None:
        peak = gl.full([ROWS], LOWEST, gl.float32, ROW)  # a query may select none of a tile, and -inf - -inf is NaN
        first, num_rows = work.first_row + group * ROWS, work.num_queries - group * ROWS
        mask = open_mask(mask_ptr, num_words, first, num_rows, work.first_tile)
    if work.num_tiles > 0:
        if mask_ptr is not None:
            words = load_words(mask, work.num_tiles - 1)
        mbarrier.wait(barriers.q_ready, 0)
        scores = warpgroup_mma_wait(0, deps=[start_scores(group, buffers, barriers, 0)])
        async_copy.mbarrier_arrive(free_at(barriers.keys, 0), increment_count=False)
        first_key = (work.num_tiles - 1) * KEYS
        num_seen = gl.full([ROWS], work.num_keys, gl.int32, ROW)
        if work.is_causal:
            query = work.first_query + group * ROWS + gl.arange(0, ROWS, layout=ROW)
            num_seen = gl.minimum(num_seen, query + 1)
        key = first_key + gl.arange(0, KEYS, layout=gl.SliceLayout(0, PRODUCT))
        scores = gl.where(gl.expand_dims(key, 0) < gl.expand_dims(num_seen, 1), scores, -float("inf"))
        if mask_ptr is not None:
            scores = select_scores(scores, words, mask)
            words = load_words(mask, work.num_tiles - 2)
        probs, factor, peak, total = softmax(scores, peak, total, scale_log2, dtype)
        await_ready(barriers.values, 0)
        if first_key + KEYS > work.num_keys:
            clear_past(buffers.v.index(0), work.num_keys - first_key)
        for step in range(1, work.num_tiles):
            scores = start_scores(group, buffers, barriers, step)
            acc = start_values(probs, buffers, step - 1, acc)
            scores = warpgroup_mma_wait(1, deps=[scores])
            async_copy.mbarrier_arrive(free_at(barriers.keys, step), increment_count=False)
            if mask_ptr is not None:
                scores = select_scores(scores, words, mask)
                words = load_words(mask, work.num_tiles - 2 - step)
            next_probs, factor, peak, total = softmax(scores, peak, total, scale_log2, dtype)
            # For the next step's product. The assembler moves no wait for products up past this one, above the softmax.
            await_ready(barriers.values, step)
            acc, probs = warpgroup_mma_wait(0, deps=[acc, probs])
            async_copy.mbarrier_arrive(free_at(barriers.values, step - 1), increment_count=False)
            acc = acc * gl.expand_dims(factor, 1)
            probs = next_probs
        acc = warpgroup_mma_wait(0, deps=[start_values(probs, buffers, work.num_tiles - 1, acc)])
    if mask_ptr is not None:
        peak = gl.where(total == 0.0, -float("inf"), peak)
    divisor = gl.where(total == 0.0, 1.0, total)  # without keys: acc 0, total 0, peak -inf
    acc = acc * gl.expand_dims(1.0 / divisor, 1)
    lse = (peak + gl.log2(divisor)) * LN2
    store_rows(group, acc, lse, buffers.q_nope.index(group), out_ptr, lse_ptr, num_heads, work)
