"""The consumers of Hopper's decode kernel with products in 16 bits: two groups of four warps.

`score_consumer` computes scores, probabilities and the left half of the output, `value_consumer` the right half, from
the same probabilities. So each half of the output fits into its group's registers. `pipeline` documents
segments, stages and mbarrier phases.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dcpmla.attention.hopper.compat import barrier, reinterpret
from dcpmla.attention.hopper.outputs import (
    arrive,
    find_partial,
    lse_of_row,
    merge_parts,
    store_columns,
    store_lse,
    store_partial,
    zero_empty,
)
from dcpmla.attention.hopper.pipeline import LN2, exp2, stage_of, start_scores
from dcpmla.attention.hopper.schedule import HALF, KEYS, ROWS, find_request, next_begin

NUM_STAGES = gl.constexpr(2)  # stages of keys that fit into shared memory
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, OUTPUT.value, 2))


@gluon.jit
def _clear_past(values, stage, num_keys):
    """Zero the rows of a stage's values [KEYS, HALF] past the last key: they may hold NaN, and 0 x NaN is NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    # A quarter has 64 columns, the width of a swizzle.
    quarters = reinterpret(values, values.dtype, [NUM_STAGES * 4, KEYS, HALF // 4], values.layout)
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(1, layout))
    for quarter in range(stage * 4, stage * 4 + 4):
        columns = quarters.index(quarter)
        columns.store(gl.where(gl.expand_dims(key, 1) < num_keys, columns.load(layout), 0.0))
    fence_async_shared()
    barrier()


@gluon.jit
def _hand_over(scores, first_key, seen, scale, peak, total, buffers, probs_ready, probs_free, num_handed):
    """Take a tile's step of the online softmax, and pass its probabilities to the other consumer.

    Returns the probabilities as an operand, the factor of earlier sums, and the new peak and total.
    """
    num_seen, num_seen_by_all = seen
    if first_key + KEYS > num_seen_by_all:
        key = first_key + gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORES))
        scores = gl.where(gl.expand_dims(num_seen, 1) > gl.expand_dims(key, 0), scores, -float("inf"))
    new_peak = gl.maximum(peak, gl.max(scores, 1))
    shift = gl.where(new_peak == -float("inf"), 0.0, new_peak) * scale  # -inf - -inf is NaN
    factor = exp2(peak * scale - shift)
    prob = exp2(scores * scale - gl.expand_dims(shift, 1))
    total = total * factor + gl.sum(prob, 1)
    weights = prob.to(buffers.probs.dtype)
    mbarrier.wait(probs_free, (num_handed & 1) ^ 1)
    buffers.probs.store(weights)
    buffers.factors.store(factor)
    mbarrier.arrive(probs_ready, count=1)
    return gl.convert_layout(weights, WEIGHTS), gl.convert_layout(factor, gl.SliceLayout(1, OUTPUT)), new_peak, total


@gluon.jit
def score_consumer(buffers, barriers, outputs, scale, value_scale, work):
    """Compute scores, probabilities, LSE, and the left half of the output.

    Both halves are multiplied by value_scale. Starting a tile's scores before the values of the previous tile would
    keep the tensor cores from waiting for its probabilities; but both tiles would stay longer in their stages, and the
    wait for memory would grow by more time than that saves.
    """
    batch = work.batch
    probs_ready, probs_free = barriers.probs_ready.index(0), barriers.probs_free.index(0)
    request, begin, start = work.request, work.begin, work.start
    num_segments, num_done, num_handed, last, last_begin = 0, 0, 0, 0, 0
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    while start < work.end:
        first_row, num_rows, num_keys = find_request(request, batch)
        stop = gl.minimum(begin + gl.cdiv(num_keys, KEYS), work.end)
        if (start < stop) & (num_rows > 0):
            token = (first_row + row) // batch.num_heads
            num_seen = gl.load(batch.lens_ptr + token, mask=row < num_rows, other=0)
            seen = num_seen, gl.load(batch.lens_ptr + first_row // batch.num_heads)
            peak = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, SCORES))
            total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
            acc = gl.zeros([ROWS, HALF], gl.float32, OUTPUT)
            key = (start - begin) * KEYS
            mbarrier.wait(barriers.q_ready, num_segments & 1)
            for _tile in range(start, stop):
                stage = num_done % NUM_STAGES
                scores = warpgroup_mma_wait(0, deps=[start_scores(buffers, barriers, num_done, SCORES)])
                weights, factor, peak, total = _hand_over(
                    scores, key, seen, scale, peak, total, buffers, probs_ready, probs_free, num_handed
                )
                if key + KEYS > num_keys:
                    _clear_past(buffers.k_left, stage, num_keys - key)
                values = stage_of(buffers.k_left, stage)
                product = warpgroup_mma(weights, values, acc * gl.expand_dims(factor, 1), is_async=True)
                acc = warpgroup_mma_wait(0, deps=[product])
                mbarrier.arrive(barriers.left_free.index(stage), count=1)
                key += KEYS
                num_done += 1
                num_handed += 1
            is_any = total != 0
            total = gl.where(is_any, total, 1.0)
            inverse = value_scale / total
            mbarrier.wait(probs_free, (num_handed & 1) ^ 1)
            buffers.factors.store(inverse)
            mbarrier.arrive(probs_ready, count=1)
            num_handed += 1
            acc = acc * gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(1, OUTPUT)), 1)
            lse = gl.where(is_any, (peak * scale + gl.log2(total)) * LN2, -float("inf"))
            if stop - start == gl.cdiv(num_keys, KEYS):
                store_columns(outputs, first_row, num_rows, 0, acc, buffers.q_left.index(0))
                store_lse(outputs, first_row, row, lse_of_row(outputs, lse), row < num_rows)
            else:
                partial = find_partial(gl.program_id(1), start == begin, batch.line)
                gl.store(outputs.partial_lses_ptr + partial * ROWS + row, lse)
                store_partial(outputs.partials_ptr, partial, 0, num_rows, acc)
                arrive(outputs.counters_ptr, begin, work)
            mbarrier.arrive(barriers.q_free, count=1)
            num_segments += 1
            last, last_begin = request, begin
            start = stop
        begin = next_begin(begin, num_keys, work)
        start = gl.maximum(start, begin)
        request += 1
    merge_parts(0, last, last_begin, work, outputs, barriers.merge_ready)


@gluon.jit
def value_consumer(buffers, barriers, outputs, work):
    """Compute the right half of the output, from the probabilities of `score_consumer`."""
    batch = work.batch
    probs_ready, probs_free = barriers.probs_ready.index(0), barriers.probs_free.index(0)
    request, begin, start = work.request, work.begin, work.start
    num_done, num_handed, last, last_begin = 0, 0, 0, 0
    while start < work.end:
        first_row, num_rows, num_keys = find_request(request, batch)
        stop = gl.minimum(begin + gl.cdiv(num_keys, KEYS), work.end)
        if (start < stop) & (num_rows > 0):
            acc = gl.zeros([ROWS, HALF], gl.float32, OUTPUT)
            for tile in range(start - begin, stop - begin):
                stage, phase = num_done % NUM_STAGES, (num_done // NUM_STAGES) & 1
                mbarrier.wait(probs_ready, num_handed & 1)
                weights = buffers.probs.load(WEIGHTS)
                factor = buffers.factors.load(gl.SliceLayout(1, OUTPUT))
                mbarrier.arrive(probs_free, count=1)
                num_handed += 1
                acc = acc * gl.expand_dims(factor, 1)
                mbarrier.wait(barriers.right_ready.index(stage), phase)
                if (tile + 1) * KEYS > num_keys:
                    _clear_past(buffers.k_right, stage, num_keys - tile * KEYS)
                product = warpgroup_mma(weights, stage_of(buffers.k_right, stage), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=[product])
                mbarrier.arrive(barriers.right_free.index(stage), count=1)
                num_done += 1
            mbarrier.wait(probs_ready, num_handed & 1)
            acc = acc * gl.expand_dims(buffers.factors.load(gl.SliceLayout(1, OUTPUT)), 1)
            mbarrier.arrive(probs_free, count=1)
            num_handed += 1
            if stop - start == gl.cdiv(num_keys, KEYS):
                store_columns(outputs, first_row, num_rows, HALF, acc, buffers.q_right.index(0))
            else:
                partial = find_partial(gl.program_id(1), start == begin, batch.line)
                store_partial(outputs.partials_ptr, partial, 1, num_rows, acc)
                arrive(outputs.counters_ptr, begin, work)
            mbarrier.arrive(barriers.q_free, count=1)
            last, last_begin = request, begin
            start = stop
        begin = next_begin(begin, num_keys, work)
        start = gl.maximum(start, begin)
        request += 1
    zero_empty(outputs, work)  # while the other parts of the last request finish
    merge_parts(1, last, last_begin, work, outputs, barriers.merge_ready)
