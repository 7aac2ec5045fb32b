"""The consumers of Hopper's decode kernel with products in fp8: three groups of four warps.

`score_consumer` computes scores and probabilities; two of `value_consumer` compute half of the output's columns each,
while the first computes the next tile. `pipeline` documents segments, `stage_ring` stages and phases.

The tensor cores multiply e4m3 only if both operands are contiguous along the sum in shared memory. Keys are for scores,
but values would have to be transposed. So the output is computed transposed, values times probabilities: its left
operand, the values, may come from registers, where loads can transpose it (`_load_values`). This changes the order of a
tile's keys, in values and probabilities alike (`_as_loaded`); a sum does not depend on it.
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
from dcpmla.attention.hopper.schedule import HALF, KEYS, ROWS, find_segment, finish_segment, next_request, start_walk
from dcpmla.attention.hopper.stage_ring import await_free, await_ready, free_at, ready_at, stage_of

NUM_STAGES = gl.constexpr(4)  # stages of keys
NUM_PROBS = gl.constexpr(2)  # stages of probabilities
# Pairs of columns that a swizzle of 128 bytes holds; the even columns are one operand, the odd ones another.
PAIRS = gl.constexpr(64)
TILE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32]))  # 64 x 64 scores, or columns x rows
VALUES = gl.constexpr(gl.DotOperandLayout(0, TILE.value, 4))
# Keys x pairs of columns, as transposing loads (ldmatrix) distribute them: a thread has four keys of a pair.
LOADED = gl.constexpr(
    gl.DistributedLinearLayout(
        [[1, 0], [8, 0], [0, 8], [16, 0], [32, 0]],
        [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]],
        [[0, 16], [0, 32]],
        [],
        [64, 64],
    )
)
PAIRS_SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
# Probabilities are scaled by 2^8: e4m3 has fewer bits below 2^-6, and its largest number is 448.
_SHIFT = gl.constexpr(8.0)


@gluon.jit
def _as_loaded(x):
    """Return x [N, KEYS] with its keys in the order of an operand from `LOADED`.

    A thread's four are 0, 1, 8 and 9 of sixteen, and so on.
    """
    rows: gl.constexpr = x.shape[0]
    return x.reshape([rows, KEYS // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([rows, KEYS])


@gluon.jit
def _load_pairs(pairs, index):
    """Load 64 pairs of columns of a tile's values; return the even columns and the odd ones, [KEYS, PAIRS] each."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;",
        "=r,=r,r,r",
        [stage_of(pairs, index).load(LOADED)],
        dtype=(gl.int8, gl.int8),
        is_pure=True,
        pack=4,
    )


@gluon.jit
def _load_values(pairs, stage):
    """Load a stage's values as an operand [HALF, KEYS].

    In both quarters, the even columns come first, then the odd columns.
    """
    even, odd = _load_pairs(pairs, stage * 2)
    more_even, more_odd = _load_pairs(pairs, stage * 2 + 1)
    columns = gl.join(gl.join(even, odd), gl.join(more_even, more_odd)).permute((3, 2, 1, 0)).reshape([HALF, KEYS])
    return gl.convert_layout(_as_loaded(columns).to(gl.float8e4nv, bitcast=True), VALUES)


@gluon.jit
def _in_columns(acc):
    """Return an output [HALF, ROWS], as `_load_values` orders its columns, with the columns in order."""
    return acc.reshape([2, 2, PAIRS, ROWS]).permute((0, 2, 1, 3)).reshape([HALF, ROWS])


@gluon.jit
def _clear_past(pairs, stage, num_keys):
    """Zero the rows of a stage's values past the last key: they may hold NaN, and 0 x NaN is NaN.

    Scores may be computed from these rows at the same time, but they are masked.
    """
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(1, LOADED))
    for half in gl.static_range(HALF // PAIRS // 2):
        columns = pairs.index(stage * (HALF // PAIRS // 2) + half)
        columns.store(gl.where(gl.expand_dims(key, 1) < num_keys, columns.load(LOADED), 0))
    fence_async_shared()  # before TMA fills the stage again
    barrier()


@gluon.jit
def _hand_over(scores, first_key, seen, scale, peak, total, buffers, barriers, num_handed):
    """Take a tile's step of the online softmax, and pass its probabilities to the consumers of values.

    Returns the new peak and total.
    """
    prob, factor, new_peak = softmax_step(scores, first_key, seen, scale, peak, _SHIFT)
    weights = _as_loaded(prob.to(gl.float8e4nv))
    stage = await_free(barriers.probs, num_handed)
    buffers.probs.index(stage).store(weights)
    buffers.factors.index(stage).store(factor)
    fence_async_shared()
    mbarrier.arrive(ready_at(barriers.probs, num_handed), count=1)
    return new_peak, total * factor + gl.sum(prob, 1)


@gluon.jit
def score_consumer(buffers, barriers, scale, q_scale_ptr, kv_scale_ptr, work):
    """Compute scores, probabilities and the LSE for the consumers of values."""
    kv_scale = gl.load(kv_scale_ptr)
    scale = scale * gl.load(q_scale_ptr) * kv_scale
    walk = start_walk(work)
    num_done, num_handed = 0, 0
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, TILE))
    while walk.start < work.end:
        segment = find_segment(walk, work)
        if segment.is_any:
            seen = seen_by_rows(row, segment, work.batch.lens_ptr, work.batch.num_heads)
            peak = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, TILE))
            total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, TILE))
            key = (walk.start - walk.begin) * KEYS
            await_ready(barriers.queries, walk.num_segments)
            # Tiles go in pairs: the second tile's scores are computed during the first tile's softmax.
            for _pair in range(0, (segment.stop - walk.start) // 2):
                scores = start_scores(buffers, barriers, num_done, TILE)
                more = start_scores(buffers, barriers, num_done + 1, TILE)
                scores = warpgroup_mma_wait(1, deps=[scores])
                peak, total = _hand_over(scores, key, seen, scale, peak, total, buffers, barriers, num_handed)
                more = warpgroup_mma_wait(0, deps=[more])
                peak, total = _hand_over(more, key + KEYS, seen, scale, peak, total, buffers, barriers, num_handed + 1)
                key += 2 * KEYS
                num_done += 2
                num_handed += 2
            if (segment.stop - walk.start) % 2 == 1:
                scores = warpgroup_mma_wait(0, deps=[start_scores(buffers, barriers, num_done, TILE)])
                peak, total = _hand_over(scores, key, seen, scale, peak, total, buffers, barriers, num_handed)
                num_done += 1
                num_handed += 1
            mbarrier.arrive(free_at(barriers.queries, walk.num_segments), count=1)
            is_any = total != 0
            total = gl.where(is_any, total, 1.0)
            stage = await_free(barriers.probs, num_handed)
            buffers.factors.index(stage).store(kv_scale / total)
            buffers.lses.store(gl.where(is_any, (peak * scale + gl.log2(total) - _SHIFT) * LN2, -float("inf")))
            mbarrier.arrive(ready_at(barriers.probs, num_handed), count=1)
            num_handed += 1
            walk = finish_segment(walk, segment)
        walk = next_request(walk, segment, work)


@gluon.jit
def value_consumer(half: gl.constexpr, buffers, barriers, outputs, work):
    """Compute half of the output's columns from the probabilities of `score_consumer`.

    The left half's consumer also stores the LSE, the right half's the results of empty requests.
    """
    values = buffers.k_right if half else buffers.k_left
    ring = barriers.right if half else barriers.left
    staging = buffers.q_right if half else buffers.q_left
    dtype: gl.constexpr = outputs.out_ptr.dtype.element_ty
    pairs = reinterpret(values, gl.int16, [NUM_STAGES * 2, KEYS, PAIRS], PAIRS_SHARED)
    staging = reinterpret(staging, dtype, [1, ROWS, 2 * PAIRS], PAIRS_SHARED)
    walk = start_walk(work)
    num_done, num_handed = 0, 0
    row = gl.arange(0, ROWS, layout=gl.BlockedLayout([1], [32], [4], [0]))
    while walk.start < work.end:
        segment = find_segment(walk, work)
        if segment.is_any:
            acc = gl.zeros([HALF, ROWS], gl.float32, TILE)
            for tile in range(walk.start - walk.begin, segment.stop - walk.begin):
                stage = await_ready(ring, num_done)
                if (tile + 1) * KEYS > segment.num_keys:
                    _clear_past(pairs, stage, segment.num_keys - tile * KEYS)
                operand = _load_values(pairs, stage)
                probs_stage = await_ready(barriers.probs, num_handed)
                weights = stage_of(buffers.probs, probs_stage).permute((1, 0))
                factor = gl.expand_dims(buffers.factors.index(probs_stage).load(gl.SliceLayout(0, TILE)), 0)
                acc = warpgroup_mma_wait(0, deps=[warpgroup_mma(operand, weights, acc * factor, is_async=True)])
                mbarrier.arrive(free_at(ring, num_done), count=1)
                mbarrier.arrive(free_at(barriers.probs, num_handed), count=1)
                num_done += 1
                num_handed += 1
            probs_stage = await_ready(barriers.probs, num_handed)
            factor = gl.expand_dims(buffers.factors.index(probs_stage).load(gl.SliceLayout(0, TILE)), 0)
            lse = None if half else buffers.lses.load(row.type.layout)
            mbarrier.arrive(free_at(barriers.probs, num_handed), count=1)
            num_handed += 1
            store_output(half, _in_columns(acc * factor), row, lse, staging, walk, segment, work, outputs)
            mbarrier.arrive(free_at(barriers.queries, walk.num_segments), count=1)
            walk = finish_segment(walk, segment)
        walk = next_request(walk, segment, work)
    if half == 1:
        zero_empty(outputs, work)  # while the other parts of the last request finish
    merge_parts(half, walk, work, outputs, barriers.merge_ready)
