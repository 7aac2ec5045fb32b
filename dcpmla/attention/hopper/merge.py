"""How programs of Hopper's decode kernel leave outputs, and merge those of a request that they share.

Each half of the columns is another group of warps' (`hopper_roles`). When all parts of a request have arrived,
their programs merge it,
each some of the rows: one that merged alone would read for longer than all of them attended.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from dcpmla.attention.hopper.rows import lse_of_row, out_at, store_lse
from dcpmla.attention.hopper.split import (
    HALF,
    ROWS,
    barrier,
    find_partial,
    find_request,
    num_shared,
    shared_parts,
    uniform,
)

GROUP = gl.constexpr(16)  # columns that lie together in a partial output
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
# An output [ROWS, HALF] as [groups of columns, quarters of their rows, 4], where it lies in registers: an instruction
# stores a quarter.
QUARTERS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0], [8, 0, 0], [0, 32, 0]],
        [[0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 8, 0], [0, 16, 0]],
        [[0, 64, 0], [0, 128, 0]],
        [],
        [16, 256, 4],
    )
)


@gluon.jit
def exp2(x):
    """In one instruction: gl.exp2 takes four more to keep denormal numbers, which nothing here needs."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def store_columns(dest, first_row, num_rows, first_column, acc, buffer, IS_SENT: gl.constexpr):
    """Columns from first_column on of rows [first_row, first_row + num_rows) from acc [ROWS, M], through a buffer
    of that shape.

    As they lie in the registers of wgmma, a warp would write to eight rows at a time.
    """
    lanes: gl.constexpr = acc.shape[1] // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])
    buffer.store(acc.to(buffer.dtype))
    barrier()
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    column = first_column + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, layout))
    at = out_at(dest, first_row, gl.expand_dims(row, 1), gl.expand_dims(column, 0), IS_SENT)
    gl.store(at, buffer.load(layout), mask=gl.expand_dims(row < num_rows, 1))
    fence_async_shared()  # before TMA fills the buffer again


@gluon.jit
def partial_at(partial, half, row, place):
    """Where an element of a partial output lies: groups of columns, all rows of one before the next.

    Places are columns in that order.
    """
    group = (partial * 2 + half) * (HALF // GROUP) + place // GROUP
    return (group * ROWS + row) * GROUP + place % GROUP


@gluon.jit
def store_partial(partials_ptr, partial, half, num_rows, acc):
    """A half of a partial output from acc [ROWS, HALF], as it lies in the registers of wgmma: a warp writes 512
    bytes without gaps.

    So the columns of a group are out of order; `_in_order` mends that when all is merged.
    """
    values = acc.reshape([ROWS, HALF // GROUP, 2, 4, 2]).permute((1, 0, 3, 2, 4)).reshape([HALF // GROUP, ROWS * 4, 4])
    group = gl.arange(0, HALF // GROUP, layout=gl.SliceLayout(1, gl.SliceLayout(2, QUARTERS)))
    quarter = gl.arange(0, ROWS * 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, QUARTERS)))
    column = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, QUARTERS)))
    at = gl.expand_dims(gl.expand_dims(group * (ROWS * GROUP), 1) + gl.expand_dims(quarter * 4, 0), 2)
    at += gl.expand_dims(gl.expand_dims(column, 0), 1)
    is_row = gl.expand_dims(gl.expand_dims(quarter // 4 < num_rows, 0), 2)
    gl.store(partials_ptr + partial_at(partial, half, 0, 0) + at, gl.convert_layout(values, QUARTERS), mask=is_row)


@gluon.jit
def _in_order(values, layout: gl.constexpr):
    """Columns of merged rows [N, HALF] as they belong."""
    rows: gl.constexpr = values.shape[0]
    values = values.reshape([rows, HALF // GROUP, 4, 2, 2]).permute((0, 1, 3, 2, 4)).reshape([rows, HALF])
    return gl.convert_layout(values, layout)


@gluon.jit
def counters_at(counters_ptr, first_part, row_tile):
    """A request that is cut has the counter of the part that it begins in."""
    return counters_ptr + row_tile * gl.num_programs(0) + first_part


@gluon.jit
def arrive(counters_ptr, first_part, row_tile):
    """Say that half of a partial output is in its place."""
    barrier()
    gl.atomic_add(counters_at(counters_ptr, first_part, row_tile), 1, sem="release", scope="gpu")


@gluon.jit
def _read(counter):
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [counter], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def await_cut(last, last_begin, work, counters_ptr, merge_ready, row_tile, IS_RAGGED: gl.constexpr):
    """Open `merge_ready` for each request that this part shares with others, its first and its last, when all its
    parts have arrived.

    The last program to see that leaves the counter as it was found.
    """
    request, begin, start, end, size, _, lens_ptr, start_ptr, query_len, num_heads = work
    for merge in range(0, num_shared(begin, start, end, last_begin)):
        _, _, num_keys = find_request(request, lens_ptr, start_ptr, query_len, num_heads, row_tile, IS_RAGGED)
        first_part, num_parts = shared_parts(begin, num_keys, size)
        if num_parts > 1:
            counter = counters_at(counters_ptr, first_part, row_tile)
            while uniform(_read(counter)) < 2 * num_parts:
                pass
            mbarrier.arrive(merge_ready.index(merge), count=1)
            if gl.atomic_add(counter, 1, sem="relaxed", scope="gpu") == 3 * num_parts - 1:
                gl.store(counter, 0)
        request, begin = last, last_begin


@gluon.jit
def merge_cut(
    half, last, last_begin, work, outputs, merge_ready, row_tile, IS_RAGGED: gl.constexpr, IS_SENT: gl.constexpr
):
    """Merge half the columns of the requests that this part shares with others: its first, its last, both or none.

    To be called when all tiles of the part are done: a wait in between would make each part wait for the whole of
        the one before it.
    """
    request, begin, start, end, size, _, lens_ptr, start_ptr, query_len, num_heads = work
    for merge in range(0, num_shared(begin, start, end, last_begin)):
        first, num_rows, num_keys = find_request(
            request, lens_ptr, start_ptr, query_len, num_heads, row_tile, IS_RAGGED
        )
        first_part, num_parts = shared_parts(begin, num_keys, size)
        if num_parts > 1:
            mbarrier.wait(merge_ready.index(merge), 0)
            num_rows = gl.minimum(num_rows, ROWS)
            rows_of_a_part = gl.cdiv(num_rows, num_parts)
            mine = (gl.program_id(0) - first_part) * rows_of_a_part
            behind = gl.minimum(mine + rows_of_a_part, num_rows)
            first_row = first * num_heads + row_tile * ROWS
            if num_parts <= 8:
                _merge_rows(half, first_part, num_parts, first_row, mine, behind, outputs, row_tile, IS_SENT, 8, 4)
            else:
                _merge_rows(half, first_part, num_parts, first_row, mine, behind, outputs, row_tile, IS_SENT, 1, 32)
        request, begin = last, last_begin


@gluon.jit
def _merge_rows(
    half,
    first_part,
    num_parts,
    first_row,
    mine,
    behind,
    outputs,
    row_tile,
    IS_SENT: gl.constexpr,
    AT_ONCE: gl.constexpr,
    PARTS: gl.constexpr,
):
    """Rows [mine, behind) of the tile: AT_ONCE of them at a time, online over PARTS partial outputs at a time."""
    dest, partials_ptr, partial_lse_ptr, _ = outputs
    row_lanes: gl.constexpr = min(
        AT_ONCE, 2
    )  # of two lanes with the same columns: one for each of two rows, or both for one row's parts
    part_lanes: gl.constexpr = 2 // row_lanes
    layout: gl.constexpr = gl.BlockedLayout(
        [AT_ONCE // row_lanes, PARTS // part_lanes, 4], [row_lanes, part_lanes, 16], [1, 1, 4], [2, 1, 0]
    )
    by_part: gl.constexpr = gl.SliceLayout(2, layout)
    by_column: gl.constexpr = gl.SliceLayout(1, layout)
    by_row: gl.constexpr = gl.BlockedLayout([AT_ONCE // row_lanes, 4], [2, 16], [1, 4], [1, 0])
    place = gl.arange(0, HALF, layout=gl.SliceLayout(0, gl.SliceLayout(0, layout)))
    for base in range(mine, behind, AT_ONCE):
        row = gl.minimum(base + gl.arange(0, AT_ONCE, layout=gl.SliceLayout(1, by_part)), ROWS - 1)
        row = gl.expand_dims(row, 1)
        peak = gl.full([AT_ONCE], -float("inf"), gl.float32, gl.SliceLayout(1, by_part))
        total = gl.zeros([AT_ONCE], gl.float32, gl.SliceLayout(1, by_part))
        acc = gl.zeros([AT_ONCE, HALF], gl.float32, by_column)
        for other in range(0, num_parts, PARTS):
            part = gl.expand_dims(other + gl.arange(0, PARTS, layout=gl.SliceLayout(0, by_part)), 0)
            there = gl.minimum(part, num_parts - 1)  # what is read twice weighs nothing the second time
            partial = find_partial(first_part + there, there == 0, row_tile)
            lse = gl.where(part < num_parts, gl.load(partial_lse_ptr + (partial * ROWS + row)), -float("inf"))
            at = partial_at(
                gl.expand_dims(partial, 2), half, gl.expand_dims(row, 2), gl.expand_dims(gl.expand_dims(place, 0), 0)
            )
            values = gl.load(partials_ptr + at)
            new_peak = gl.maximum(peak, gl.max(lse, 1))
            shift = gl.where(new_peak == -float("inf"), 0.0, new_peak)  # -inf - -inf is NaN
            factor = exp2((peak - shift) * LOG2E)
            weights = exp2((lse - gl.expand_dims(shift, 1)) * LOG2E)
            total = total * factor + gl.sum(weights, 1)
            column_factor = gl.convert_layout(factor, gl.SliceLayout(1, by_column))
            acc = acc * gl.expand_dims(column_factor, 1) + gl.sum(values * gl.expand_dims(weights, 2), 1)
            peak = new_peak
        is_any = total != 0
        total = gl.where(is_any, total, 1.0)
        acc = _in_order(acc / gl.expand_dims(gl.convert_layout(total, gl.SliceLayout(1, by_column)), 1), by_row)
        if half == 0:
            lse = gl.where(is_any, peak + gl.log2(total) * LN2, -float("inf"))
            lse_row = base + gl.arange(0, AT_ONCE, layout=gl.SliceLayout(1, by_part))
            store_lse(dest, first_row, lse_row, lse_of_row(lse, IS_SENT), lse_row < behind, IS_SENT)
        out_row = gl.expand_dims(base + gl.arange(0, AT_ONCE, layout=gl.SliceLayout(1, by_row)), 1)
        out_column = half * HALF + gl.expand_dims(gl.arange(0, HALF, layout=gl.SliceLayout(0, by_row)), 0)
        at = out_at(dest, first_row, out_row, out_column, IS_SENT)
        gl.store(at, acc.to(dest[0].dtype.element_ty), mask=out_row < behind)
