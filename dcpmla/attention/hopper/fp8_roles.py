"""The scorer and the values' groups of Hopper's decode kernel with fp8 products; `mla_decode_hopper_fp8` says what
each is for.

The tensor cores multiply e4m3 only where both operands lie along the sum in shared memory. Keys do for scores, but
values would have to be transposed. So the output is computed transposed, values times probabilities: its left operand,
the values, may come
from registers, and there a transposition is a matter of who loads what (`_load_values`). Keys stand in a tile in the
order that this
leaves them in, in values and probabilities alike (`_as_loaded`): a sum does not care.

Segments, barriers and counts are as in `hopper_roles`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dcpmla.attention.hopper.merge import GROUP, LN2, arrive, exp2, merge_cut, partial_at, store_columns
from dcpmla.attention.hopper.roles import here, reinterpret, start_scores, zero_empty
from dcpmla.attention.hopper.rows import lse_of_row, store_lse
from dcpmla.attention.hopper.split import HALF, KEYS, ROWS, barrier, find_partial, find_request, next_begin

NUM_STAGES = gl.constexpr(4)  # of keys
NUM_HANDED = gl.constexpr(2)  # tiles of probabilities
PAIRS = gl.constexpr(
    64
)  # of columns, that a swizzle of 128 bytes holds; the even columns are one operand, the odd ones another
TILE = gl.constexpr(
    gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
)  # of 64 x 64: scores, and an output's columns x rows
VALUES = gl.constexpr(gl.DotOperandLayout(0, TILE.value, 4))
# Keys x pairs of columns, as transposing loads (ldmatrix) hand them out: four keys of a pair to a thread.
LOADED = gl.constexpr(
    gl.DistributedLinearLayout(
        [[1, 0], [8, 0], [0, 8], [16, 0], [32, 0]],
        [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]],
        [[0, 16], [0, 32]],
        [],
        [64, 64],
    )
)
# A half of a partial output, laid out as [groups of columns, rows, 16], where it lies in registers: a thread has two
# columns side by side.
PARTIAL = gl.constexpr(
    gl.DistributedLinearLayout(
        [[1], [16], [1024], [128], [256], [512], [8192]],
        [[32], [64], [4], [8], [2]],
        [[2048], [4096]],
        [],
        [HALF.value * ROWS.value],
    )
)
PAIRS_SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
_SHIFT = gl.constexpr(
    8.0
)  # probabilities are scaled by 2^8: e4m3 has fewer bits below 2^-6, and its largest number is 448


@gluon.jit
def _as_loaded(x):
    """Keys [N, KEYS] in the order in which `LOADED` has them in an operand: four in a thread are 0, 1, 8 and 9 of
    sixteen, and so on.
    """
    rows: gl.constexpr = x.shape[0]
    return x.reshape([rows, KEYS // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([rows, KEYS])


@gluon.jit
def _load_pairs(pairs, index):
    """Of a tile's values, 64 pairs of columns as [KEYS, PAIRS]: the even columns, and the odd ones."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;",
        "=r,=r,r,r",
        [here(pairs, index).load(LOADED)],
        dtype=(gl.int8, gl.int8),
        is_pure=True,
        pack=4,
    )


@gluon.jit
def _load_values(pairs, stage):
    """A stage's values as an operand [HALF, KEYS]: of both quarters of the columns first the even ones, then the odd
    ones.
    """
    even, odd = _load_pairs(pairs, stage * 2)
    more_even, more_odd = _load_pairs(pairs, stage * 2 + 1)
    columns = gl.join(gl.join(even, odd), gl.join(more_even, more_odd)).permute((3, 2, 1, 0)).reshape([HALF, KEYS])
    return gl.convert_layout(_as_loaded(columns).to(gl.float8e4nv, bitcast=True), VALUES)


@gluon.jit
def _in_columns(acc):
    """An output [HALF, ROWS] as it was summed -> [HALF, ROWS] with its columns in order."""
    return acc.reshape([2, 2, PAIRS, ROWS]).permute((0, 2, 1, 3)).reshape([HALF, ROWS])


@gluon.jit
def _clear_behind(pairs, stage, num_keys):
    """Zero the rows of a stage's values behind the last key: what stands there may be NaN, and 0 x NaN is NaN.

    The scorer may be at them: whatever scores it finds there, it leaves out.
    """
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(1, LOADED))
    for half in gl.static_range(HALF // PAIRS // 2):
        columns = pairs.index(stage * (HALF // PAIRS // 2) + half)
        columns.store(gl.where(gl.expand_dims(key, 1) < num_keys, columns.load(LOADED), 0))
    fence_async_shared()  # before TMA fills the stage again
    barrier()


@gluon.jit
def _hand_over(scores, first_key, seen, scale, peak, total, handed, probs_ready, probs_free, num_handed):
    """A tile's step of the online softmax: probabilities and the factor of what was summed before, into the values'
    groups' buffers.
    """
    probs, factors, _ = handed
    num_seen, num_seen_by_all = seen
    if first_key + KEYS > num_seen_by_all:
        key = first_key + gl.arange(0, KEYS, layout=gl.SliceLayout(0, TILE))
        scores = gl.where(gl.expand_dims(num_seen, 1) > gl.expand_dims(key, 0), scores, -float("inf"))
    new_peak = gl.maximum(peak, gl.max(scores, 1))
    shift = gl.where(new_peak == -float("inf"), 0.0, new_peak) * scale  # -inf - -inf is NaN
    factor = exp2(peak * scale - shift)
    prob = exp2(scores * scale - gl.expand_dims(shift - _SHIFT, 1))
    weights = _as_loaded(prob.to(gl.float8e4nv))
    place, phase = num_handed % NUM_HANDED, (num_handed // NUM_HANDED) & 1
    mbarrier.wait(probs_free.index(place), phase ^ 1)
    probs.index(place).store(weights)
    factors.index(place).store(factor)
    fence_async_shared()
    mbarrier.arrive(probs_ready.index(place), count=1)
    return new_peak, total * factor + gl.sum(prob, 1)


@gluon.jit
def score_role(buffers, handed, ready, free, scales, work, row_tile, IS_RAGGED: gl.constexpr):
    """The scorer: scores, probabilities and the LSE, all handed to the values' groups."""
    q_ready, _, _, probs_ready, _ = ready
    q_free, _, _, probs_free = free
    probs, factors, lses = handed
    scale, q_scale_ptr, kv_scale_ptr = scales
    request, begin, start, end, _, granule, lens_ptr, start_ptr, query_len, num_heads = work
    kv_scale = gl.load(kv_scale_ptr)
    scale = scale * gl.load(q_scale_ptr) * kv_scale
    num_segments, num_done, num_handed = 0, 0, 0
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, TILE))
    while start < end:
        first, num_rows, num_keys = find_request(
            request, lens_ptr, start_ptr, query_len, num_heads, row_tile, IS_RAGGED
        )
        stop = gl.minimum(begin + gl.cdiv(num_keys, KEYS), end)
        if start < stop:
            num_seen = gl.load(lens_ptr + first + (row_tile * ROWS + row) // num_heads, mask=row < num_rows, other=0)
            seen = num_seen, gl.load(lens_ptr + first + row_tile * ROWS // num_heads)
            peak = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, TILE))
            total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, TILE))
            key = (start - begin) * KEYS
            mbarrier.wait(q_ready, num_segments & 1)
            for _pair in range(
                0, (stop - start) // 2
            ):  # of tiles: the scores of the second are summed up under the softmax of the first
                scores = start_scores(buffers, ready, num_done, TILE)
                more = start_scores(buffers, ready, num_done + 1, TILE)
                scores = warpgroup_mma_wait(1, deps=[scores])
                peak, total = _hand_over(
                    scores, key, seen, scale, peak, total, handed, probs_ready, probs_free, num_handed
                )
                more = warpgroup_mma_wait(0, deps=[more])
                peak, total = _hand_over(
                    more, key + KEYS, seen, scale, peak, total, handed, probs_ready, probs_free, num_handed + 1
                )
                key += 2 * KEYS
                num_done += 2
                num_handed += 2
            if (stop - start) % 2 == 1:
                scores = warpgroup_mma_wait(0, deps=[start_scores(buffers, ready, num_done, TILE)])
                peak, total = _hand_over(
                    scores, key, seen, scale, peak, total, handed, probs_ready, probs_free, num_handed
                )
                num_done += 1
                num_handed += 1
            mbarrier.arrive(q_free, count=1)
            is_any = total != 0
            total = gl.where(is_any, total, 1.0)
            place, phase = num_handed % NUM_HANDED, (num_handed // NUM_HANDED) & 1
            mbarrier.wait(probs_free.index(place), phase ^ 1)
            factors.index(place).store(kv_scale / total)
            lses.store(gl.where(is_any, (peak * scale + gl.log2(total) - _SHIFT) * LN2, -float("inf")))
            mbarrier.arrive(probs_ready.index(place), count=1)
            num_handed += 1
            num_segments += 1
            start = stop
        begin = next_begin(begin, num_keys, granule)
        start = gl.maximum(start, begin)
        request += 1


@gluon.jit
def _store_partial(partials_ptr, partial, half, num_rows, acc):
    """A half of a partial output [columns, rows], in the order that `hopper_merge` reads."""
    groups: gl.constexpr = HALF // GROUP
    values = acc.reshape([groups, 2, 4, 2, ROWS]).permute((0, 4, 2, 1, 3)).reshape([HALF * ROWS])
    at = gl.arange(0, HALF * ROWS, layout=PARTIAL)
    is_row = at // GROUP % ROWS < num_rows
    gl.store(partials_ptr + partial_at(partial, half, 0, 0) + at, gl.convert_layout(values, PARTIAL), mask=is_row)


@gluon.jit
def value_role(
    half: gl.constexpr,
    buffers,
    handed,
    ready,
    free,
    outputs,
    num_reqs,
    work,
    row_tile,
    IS_RAGGED: gl.constexpr,
    IS_SENT: gl.constexpr,
):
    """A half of the output's columns, from the scorer's probabilities.

    The left one also writes the LSE, the right one what is empty.
    """
    probs, factors, lses = handed
    _, left_ready, right_ready, probs_ready, merge_ready = ready
    q_free, left_free, right_free, probs_free = free
    values = buffers[3 + half]
    values_ready = right_ready if half else left_ready
    values_free = right_free if half else left_free
    dest, partials_ptr, partial_lse_ptr, counters_ptr = outputs
    dtype: gl.constexpr = dest[0].dtype.element_ty
    request, begin, start, end, size, granule, lens_ptr, start_ptr, query_len, num_heads = work
    pairs = reinterpret(values, gl.int16, [NUM_STAGES * 2, KEYS, PAIRS], PAIRS_SHARED)
    staging = reinterpret(buffers[half], dtype, [1, ROWS, 2 * PAIRS], PAIRS_SHARED)
    num_done, num_handed, last, last_begin = 0, 0, 0, 0
    row = gl.arange(0, ROWS, layout=gl.BlockedLayout([1], [32], [4], [0]))
    while start < end:
        first, num_rows, num_keys = find_request(
            request, lens_ptr, start_ptr, query_len, num_heads, row_tile, IS_RAGGED
        )
        stop = gl.minimum(begin + gl.cdiv(num_keys, KEYS), end)
        if start < stop:
            acc = gl.zeros([HALF, ROWS], gl.float32, TILE)
            for tile in range(start - begin, stop - begin):
                stage, phase = num_done % NUM_STAGES, (num_done // NUM_STAGES) & 1
                place = num_handed % NUM_HANDED
                mbarrier.wait(values_ready.index(stage), phase)
                if (tile + 1) * KEYS > num_keys:
                    _clear_behind(pairs, stage, num_keys - tile * KEYS)
                operand = _load_values(pairs, stage)
                mbarrier.wait(probs_ready.index(place), (num_handed // NUM_HANDED) & 1)
                weights = here(probs, place).permute((1, 0))
                factor = gl.expand_dims(factors.index(place).load(gl.SliceLayout(0, TILE)), 0)
                acc = warpgroup_mma_wait(0, deps=[warpgroup_mma(operand, weights, acc * factor, is_async=True)])
                mbarrier.arrive(values_free.index(stage), count=1)
                mbarrier.arrive(probs_free.index(place), count=1)
                num_done += 1
                num_handed += 1
            place = num_handed % NUM_HANDED
            mbarrier.wait(probs_ready.index(place), (num_handed // NUM_HANDED) & 1)
            factor = gl.expand_dims(factors.index(place).load(gl.SliceLayout(0, TILE)), 0)
            lse = lses.load(row.type.layout)
            mbarrier.arrive(probs_free.index(place), count=1)
            num_handed += 1
            first_row = first * num_heads + row_tile * ROWS
            columns = _in_columns(acc * factor)
            if stop - start == gl.cdiv(num_keys, KEYS):
                first_columns, last_columns = (
                    columns.permute((1, 0)).reshape([ROWS, 2, 2 * PAIRS]).permute((0, 2, 1)).split()
                )
                store_columns(dest, first_row, num_rows, half * HALF, first_columns, staging.index(0), IS_SENT)
                barrier()  # all have read the first columns
                store_columns(
                    dest, first_row, num_rows, half * HALF + 2 * PAIRS, last_columns, staging.index(0), IS_SENT
                )
                if half == 0:
                    store_lse(dest, first_row, row, lse_of_row(lse, IS_SENT), row < num_rows, IS_SENT)
            else:
                partial = find_partial(gl.program_id(0), start == begin, row_tile)
                if half == 0:
                    gl.store(partial_lse_ptr + partial * ROWS + row, lse)
                _store_partial(partials_ptr, partial, half, num_rows, columns)
                arrive(counters_ptr, begin // size, row_tile)
            mbarrier.arrive(q_free, count=1)
            last, last_begin = request, begin
            start = stop
        begin = next_begin(begin, num_keys, granule)
        start = gl.maximum(start, begin)
        request += 1
    if half == 1:
        zero_empty(
            num_reqs, dest, work, row_tile, IS_RAGGED, IS_SENT
        )  # while the other parts of the last request come to their end
    merge_cut(half, last, last_begin, work, outputs, merge_ready, row_tile, IS_RAGGED, IS_SENT)
