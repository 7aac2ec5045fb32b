"""The merge of a request's partial outputs in Hopper's decode kernel, inside the launch that stored them.

Each program that has a part of the request merges a share of the rows: one program alone would need more time to read
them than all programs need to attend.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from dcpmla.attention.hopper.outputs import lse_of_row, out_at, store_lse
from dcpmla.attention.hopper.partials import GROUP, find_partial, partial_at
from dcpmla.attention.hopper.pipeline import LN2, LOG2E, exp2
from dcpmla.attention.hopper.schedule import HALF, ROWS, find_request, num_shared, sharing_parts


@gluon.jit
def merge_parts(half, walk, work, outputs, merge_ready):
    """Merge half the columns of the requests that this part shares with others: its first, its last, both or none.

    A role calls this after the last tile of its part: waiting earlier would make each part wait for all of the previous
    part.
    """
    request, begin, batch = work.request, work.begin, work.batch
    for merge in range(0, num_shared(work, walk.last_begin)):
        first_row, num_rows, num_keys = find_request(request, batch)
        first_part, num_parts = sharing_parts(begin, num_keys, work)
        if (num_parts > 1) & (num_rows > 0):
            mbarrier.wait(merge_ready.index(merge), 0)
            num_rows = gl.minimum(num_rows, ROWS)
            rows_of_a_part = gl.cdiv(num_rows, num_parts)
            start = (gl.program_id(1) - first_part) * rows_of_a_part
            stop = gl.minimum(start + rows_of_a_part, num_rows)
            if num_parts <= 8:
                _merge_rows(half, first_part, num_parts, first_row, start, stop, outputs, batch.line, 8, 4)
            else:
                _merge_rows(half, first_part, num_parts, first_row, start, stop, outputs, batch.line, 1, 32)
        request, begin = walk.last, walk.last_begin


@gluon.jit
def _merge_rows(
    half, first_part, num_parts, first_row, start, stop, outputs, line, AT_ONCE: gl.constexpr, PARTS: gl.constexpr
):
    """Merge rows [start, stop) of the tile, AT_ONCE at a time, online over PARTS partial outputs at a time."""
    # Two lanes have the same columns: one for each of two rows, or both for the parts of one row.
    row_lanes: gl.constexpr = min(AT_ONCE, 2)
    part_lanes: gl.constexpr = 2 // row_lanes
    layout: gl.constexpr = gl.BlockedLayout(
        [AT_ONCE // row_lanes, PARTS // part_lanes, 4], [row_lanes, part_lanes, 16], [1, 1, 4], [2, 1, 0]
    )
    by_part: gl.constexpr = gl.SliceLayout(2, layout)
    by_column: gl.constexpr = gl.SliceLayout(1, layout)
    by_row: gl.constexpr = gl.BlockedLayout([AT_ONCE // row_lanes, 4], [2, 16], [1, 4], [1, 0])
    index = gl.arange(0, HALF, layout=gl.SliceLayout(0, gl.SliceLayout(0, layout)))
    for base in range(start, stop, AT_ONCE):
        row = gl.minimum(base + gl.arange(0, AT_ONCE, layout=gl.SliceLayout(1, by_part)), ROWS - 1)
        row = gl.expand_dims(row, 1)
        peak = gl.full([AT_ONCE], -float("inf"), gl.float32, gl.SliceLayout(1, by_part))
        total = gl.zeros([AT_ONCE], gl.float32, gl.SliceLayout(1, by_part))
        acc = gl.zeros([AT_ONCE, HALF], gl.float32, by_column)
        for other in range(0, num_parts, PARTS):
            part = gl.expand_dims(other + gl.arange(0, PARTS, layout=gl.SliceLayout(0, by_part)), 0)
            known = gl.minimum(part, num_parts - 1)  # a part that is read twice has weight 0 the second time
            partial = find_partial(first_part + known, known == 0, line)
            lse = gl.where(part < num_parts, gl.load(outputs.partial_lses_ptr + (partial * ROWS + row)), -float("inf"))
            at = partial_at(
                gl.expand_dims(partial, 2), half, gl.expand_dims(row, 2), gl.expand_dims(gl.expand_dims(index, 0), 0)
            )
            values = gl.load(outputs.partials_ptr + at)
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
            store_lse(outputs, first_row, lse_row, lse_of_row(outputs, lse), lse_row < stop)
        out_row = gl.expand_dims(base + gl.arange(0, AT_ONCE, layout=gl.SliceLayout(1, by_row)), 1)
        out_column = half * HALF + gl.expand_dims(gl.arange(0, HALF, layout=gl.SliceLayout(0, by_row)), 0)
        at = out_at(outputs, first_row, out_row, out_column)
        gl.store(at, acc.to(outputs.out_ptr.dtype.element_ty), mask=out_row < stop)


@gluon.jit
def _in_order(values, layout: gl.constexpr):
    """Return merged rows [N, HALF] with the columns of each group in order again (`store_partial`)."""
    rows: gl.constexpr = values.shape[0]
    values = values.reshape([rows, HALF // GROUP, 4, 2, 2]).permute((0, 1, 3, 2, 4)).reshape([rows, HALF])
    return gl.convert_layout(values, layout)
