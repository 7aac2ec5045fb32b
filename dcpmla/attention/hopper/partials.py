"""Partial outputs of Hopper's decode kernel in memory, and the counters of their arrivals.

A part with only some of a request's keys stores a partial output. When all parts of the request have stored theirs,
their programs merge them (`merge`). Each half of the columns belongs to another group of warps.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from dcpmla.attention.hopper.compat import barrier
from dcpmla.attention.hopper.schedule import HALF, LATENT, ROWS, find_request, num_shared, sharing_parts, uniform

GROUP = gl.constexpr(16)  # adjacent columns in a partial output
# An output [ROWS, HALF] as [groups of columns, quarters of their rows, 4], as wgmma leaves it in registers: an
# instruction stores a quarter.
QUARTERS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0], [8, 0, 0], [0, 32, 0]],
        [[0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 8, 0], [0, 16, 0]],
        [[0, 64, 0], [0, 128, 0]],
        [],
        [16, 256, 4],
    )
)
# A group of columns of QUARTERS, each element in the same thread.
GROUP_QUARTERS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [32, 0]],
        [[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]],
        [[64, 0], [128, 0]],
        [],
        [256, 4],
    )
)
# An output [HALF, ROWS] as [groups of columns, rows, 16], in one dim: a thread has two adjacent columns.
PAIRS_OF_COLUMNS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[1], [16], [1024], [128], [256], [512], [8192]],
        [[32], [64], [4], [8], [2]],
        [[2048], [4096]],
        [],
        [HALF.value * ROWS.value],
    )
)


@gluon.jit
def find_partial(part, begins, line):
    """Return the number of a part's partial output.

    A part may store two partial outputs: one for a request that it continues, one for a request that it begins.
    """
    return (line * gl.num_programs(1) + part) * 2 + begins.to(gl.int32)


@gluon.jit
def partial_at(partial, half, row, index):
    """Return the offset of an element of half a partial output.

    All rows of a group of columns come before the next group. `index` is a column in the order of `store_partial`.
    """
    group = (partial * 2 + half) * (HALF // GROUP) + index // GROUP
    return (group * ROWS + row) * GROUP + index % GROUP


@gluon.jit
def store_partial(partials_ptr, first_row, half, stored_rows, num_rows, acc):
    """Store half a partial output from acc [ROWS, HALF], or [HALF, ROWS], straight from the registers of wgmma.

    A warp writes 512 contiguous bytes, so the columns of a group are out of order; `merge` restores the order.

    Args:
        first_row: Number of rows of the partial outputs before it.
        stored_rows: Number of rows that it has memory for.
        num_rows: Number of rows to store.
    """
    groups: gl.constexpr = HALF // GROUP
    layout: gl.constexpr = PAIRS_OF_COLUMNS if acc.shape[0] == HALF else QUARTERS
    if acc.shape[0] == HALF:
        values = acc.reshape([groups, 2, 4, 2, ROWS]).permute((0, 4, 2, 1, 3)).reshape([HALF * ROWS])
        at = gl.arange(0, HALF * ROWS, layout=layout)  # stored_rows is ROWS
        is_row = at // GROUP % ROWS < num_rows
    else:
        values = acc.reshape([ROWS, groups, 2, 4, 2]).permute((1, 0, 3, 2, 4)).reshape([groups, ROWS * 4, 4])
        group = gl.arange(0, groups, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
        quarter = gl.arange(0, ROWS * 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
        column = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
        at = gl.expand_dims(gl.expand_dims(group * (stored_rows * GROUP), 1) + gl.expand_dims(quarter * 4, 0), 2)
        at += gl.expand_dims(gl.expand_dims(column, 0), 1)
        is_row = gl.expand_dims(gl.expand_dims(quarter // 4 < num_rows, 0), 2)
    to = _half_at(partials_ptr, first_row, half, stored_rows)
    gl.store(to + at, gl.convert_layout(values, layout), mask=is_row)


@gluon.jit
def _half_at(partials_ptr, first_row, half, stored_rows):
    """Return a pointer to half a partial output (`store_partial`)."""
    return partials_ptr + first_row.to(gl.int64) * LATENT + half * (stored_rows * HALF)


@gluon.jit
def add_partial(partials_ptr, first_row, other_row, half, num_rows, share, other_share):
    """Merge half a partial output at other_row into the one at first_row, by the shares of both [ROWS], group by group.

    This program's threads have stored both by `store_partial`, each the elements that it reads here.
    """
    to = _half_at(partials_ptr, first_row, half, num_rows)
    other = _half_at(partials_ptr, other_row, half, num_rows)
    quarter = gl.arange(0, ROWS * 4, layout=gl.SliceLayout(1, GROUP_QUARTERS))
    column = gl.arange(0, 4, layout=gl.SliceLayout(0, GROUP_QUARTERS))
    is_row = gl.expand_dims(quarter // 4 < num_rows, 1)
    share, other_share = _by_quarter(share), _by_quarter(other_share)
    at = gl.expand_dims(quarter * 4, 1) + gl.expand_dims(column, 0)
    for _group in range(0, HALF // GROUP):
        added = gl.load(other + at, mask=is_row, other=0.0) * other_share
        gl.store(to + at, gl.fma(gl.load(to + at, mask=is_row, other=0.0), share, added), mask=is_row)
        at += num_rows * GROUP


@gluon.jit
def _by_quarter(share):
    """Return shares [ROWS] for the elements of a group [ROWS * 4, 4]."""
    share = gl.expand_dims(share, 1).broadcast_to([ROWS, 16]).reshape([ROWS * 4, 4])
    return gl.convert_layout(share, GROUP_QUARTERS)


@gluon.jit
def _counter_at(counters_ptr, first_part, line):
    """Return a pointer to the counter of a request that is cut, which belongs to the part in which it begins."""
    return counters_ptr + line * gl.num_programs(1) + first_part


@gluon.jit
def arrive(counters_ptr, begin, work):
    """Count half a partial output of the request whose tiles begin at `begin` as stored."""
    first_part = begin // work.size
    barrier()
    gl.atomic_add(_counter_at(counters_ptr, first_part, work.batch.line), 1, sem="release", scope="gpu")


@gluon.jit
def _read(counter):
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [counter], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def await_parts(walk, work, counters_ptr, merge_ready):
    """Open `merge_ready` for each request that this part shares, its first and its last, once all its parts arrived.

    The last program to see that resets the counter for the next launch.
    """
    request, begin = work.request, work.begin
    for merge in range(0, num_shared(work, walk.last_begin)):
        _, num_rows, num_keys = find_request(request, work.batch)
        first_part, num_parts = sharing_parts(begin, num_keys, work)
        if (num_parts > 1) & (num_rows > 0):
            counter = _counter_at(counters_ptr, first_part, work.batch.line)
            while uniform(_read(counter)) < 2 * num_parts:
                pass
            mbarrier.arrive(merge_ready.index(merge), count=1)
            if gl.atomic_add(counter, 1, sem="relaxed", scope="gpu") == 3 * num_parts - 1:
                gl.store(counter, 0)
        request, begin = walk.last, walk.last_begin
