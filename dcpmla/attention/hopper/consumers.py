"""The consumers of Hopper's decode kernel with products in 16 bits: two groups of four warps.

`score_consumer` computes scores, probabilities and the left half of the output, `value_consumer` the right half, from
the same probabilities. So each half of the output fits into its group's registers. `pipeline` documents
segments, `stage_ring` stages and phases.
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
from dcpmla.attention.hopper.merge import merge_parts
from dcpmla.attention.hopper.outputs import store_output, zero_empty
from dcpmla.attention.hopper.pipeline import LN2, seen_by_rows, softmax_step, start_scores
from dcpmla.attention.hopper.schedule import (
    HALF,
    KEYS,
    ROWS,
    find_segment,
    finish_segment,
    first_key,
    next_request,
    start_walk,
)
from dcpmla.attention.hopper.stage_ring import await_free, await_ready, free_at, ready_at, stage_of

NUM_STAGES = gl.constexpr(2)  # stages of keys that fit into shared memory
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, OUTPUT.value, 2))


@gluon.jit
def _clear_past(values, stage, first_key, num_keys):
    """Zero the rows of a stage's values [KEYS, HALF] past the last key: they may hold NaN, and 0 x NaN is NaN."""
    if first_key + KEYS > num_keys:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        # A quarter has 64 columns, the width of a swizzle.
        quarters = reinterpret(values, values.dtype, [NUM_STAGES * 4, KEYS, HALF // 4], values.layout)
        key = gl.arange(0, KEYS, layout=gl.SliceLayout(1, layout))
        for quarter in range(stage * 4, stage * 4 + 4):
            columns = quarters.index(quarter)
            columns.store(gl.where(gl.expand_dims(key, 1) < num_keys - first_key, columns.load(layout), 0.0))
        fence_async_shared()
        barrier()


@gluon.jit
def hand_factor(factor, buffers, barriers, num_handed):
    """Pass a factor of each row to the other consumer; return it as an operand."""
    await_free(barriers.probs, num_handed)
    buffers.factors.store(factor)
    mbarrier.arrive(ready_at(barriers.probs, num_handed), count=1)
    return gl.convert_layout(factor, gl.SliceLayout(1, OUTPUT))


@gluon.jit
def take_factor(buffers, barriers, num_handed):
    """Return the factor of each row that the other consumer passes."""
    await_ready(barriers.probs, num_handed)
    factor = buffers.factors.load(gl.SliceLayout(1, OUTPUT))
    mbarrier.arrive(free_at(barriers.probs, num_handed), count=1)
    return factor


@gluon.jit
def _hand_over(prob, factor, buffers, barriers, num_handed):
    """Pass a tile's probabilities and the factor of earlier sums to the other consumer; return both as operands."""
    weights = prob.to(buffers.probs.dtype)
    await_free(barriers.probs, num_handed)
    buffers.probs.store(weights)
    buffers.factors.store(factor)
    mbarrier.arrive(ready_at(barriers.probs, num_handed), count=1)
    return gl.convert_layout(weights, WEIGHTS), gl.convert_layout(factor, gl.SliceLayout(1, OUTPUT))


@gluon.jit
def score_tiles(first, stop, segment, seen, scale, value_scale, buffers, barriers, num_done, num_handed):
    """Attend to tiles [first, stop) of a segment; pass the probabilities, and then 1 / their sum, to `value_tiles`.

    Returns the left half of the output, times value_scale, the LSE of each row, and the numbers of tiles done and of
    factors handed over so far. Starting a tile's scores before the values of the previous tile would keep the tensor
    cores from waiting for its probabilities; but both tiles would stay longer in their stages, and the wait for memory
    would grow by more time than that saves.
    """
    peak = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
    acc = gl.zeros([ROWS, HALF], gl.float32, OUTPUT)
    for tile in range(first, stop):
        key = first_key(tile, segment)
        scores = warpgroup_mma_wait(0, deps=[start_scores(buffers, barriers, num_done, SCORES)])
        prob, factor, peak = softmax_step(scores, key, seen, scale, peak, 0.0)
        total = total * factor + gl.sum(prob, 1)
        weights, factor = _hand_over(prob, factor, buffers, barriers, num_handed)
        stage = num_done % NUM_STAGES
        _clear_past(buffers.k_left, stage, key, segment.num_keys)
        values = stage_of(buffers.k_left, stage)
        product = warpgroup_mma(weights, values, acc * gl.expand_dims(factor, 1), is_async=True)
        acc = warpgroup_mma_wait(0, deps=[product])
        mbarrier.arrive(free_at(barriers.left, num_done), count=1)
        num_done += 1
        num_handed += 1
    is_any = total != 0
    total = gl.where(is_any, total, 1.0)
    inverse = hand_factor(value_scale / total, buffers, barriers, num_handed)
    lse = gl.where(is_any, (peak * scale + gl.log2(total)) * LN2, -float("inf"))
    return acc * gl.expand_dims(inverse, 1), lse, num_done, num_handed + 1


@gluon.jit
def value_tiles(first, stop, segment, buffers, barriers, num_done, num_handed):
    """Return the right half of the output of `score_tiles`, from its probabilities, and the same numbers."""
    acc = gl.zeros([ROWS, HALF], gl.float32, OUTPUT)
    for tile in range(first, stop):
        await_ready(barriers.probs, num_handed)
        weights = buffers.probs.load(WEIGHTS)
        factor = buffers.factors.load(gl.SliceLayout(1, OUTPUT))
        mbarrier.arrive(free_at(barriers.probs, num_handed), count=1)
        num_handed += 1
        acc = acc * gl.expand_dims(factor, 1)
        stage = await_ready(barriers.right, num_done)
        _clear_past(buffers.k_right, stage, first_key(tile, segment), segment.num_keys)
        product = warpgroup_mma(weights, stage_of(buffers.k_right, stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[product])
        mbarrier.arrive(free_at(barriers.right, num_done), count=1)
        num_done += 1
    inverse = take_factor(buffers, barriers, num_handed)
    return acc * gl.expand_dims(inverse, 1), num_done, num_handed + 1


@gluon.jit
def score_consumer(buffers, barriers, outputs, scale, value_scale, work):
    """Compute scores, probabilities, LSE, and the left half of the output.

    Both halves are multiplied by value_scale.
    """
    walk = start_walk(work)
    num_done, num_handed = 0, 0
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    while walk.start < work.end:
        segment = find_segment(walk, work)
        if segment.is_any:
            seen = seen_by_rows(row, segment, work.batch.lens_ptr, work.batch.num_heads)
            await_ready(barriers.queries, walk.num_segments)
            tiles = walk.start - walk.begin, segment.stop - walk.begin
            numbers = num_done, num_handed
            acc, lse, num_done, num_handed = score_tiles(
                *tiles, segment, seen, scale, value_scale, buffers, barriers, *numbers
            )
            store_output(0, acc, row, lse, buffers.q_left, walk, segment, work, outputs)
            mbarrier.arrive(free_at(barriers.queries, walk.num_segments), count=1)
            walk = finish_segment(walk, segment)
        walk = next_request(walk, segment, work)
    merge_parts(0, walk, work, outputs, barriers.merge_ready)


@gluon.jit
def value_consumer(buffers, barriers, outputs, work):
    """Compute the right half of the output, from the probabilities of `score_consumer`."""
    walk = start_walk(work)
    num_done, num_handed = 0, 0
    while walk.start < work.end:
        segment = find_segment(walk, work)
        if segment.is_any:
            tiles = walk.start - walk.begin, segment.stop - walk.begin
            numbers = num_done, num_handed
            acc, num_done, num_handed = value_tiles(*tiles, segment, buffers, barriers, *numbers)
            store_output(1, acc, None, None, buffers.q_right, walk, segment, work, outputs)
            mbarrier.arrive(free_at(barriers.queries, walk.num_segments), count=1)
            walk = finish_segment(walk, segment)
        walk = next_request(walk, segment, work)
    zero_empty(outputs, work)  # while the other parts of the last request finish
    merge_parts(1, walk, work, outputs, barriers.merge_ready)
