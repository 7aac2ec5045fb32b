"""Outputs of Hopper's decode kernel: rows into tensors or to the ranks that own their heads; partial outputs, merged.

A row that is sent is stored where `comm.kernels.exchange.combine_kernel` would store it: this is that kernel's first
half, done as soon as a row is computed.

A part with only some of a request's keys stores a partial output. When all parts of the request have stored theirs,
their programs merge them inside the same launch, each program a share of the rows: one program alone would need more
time to read them than all programs need to attend. Each half of the columns belongs to another group of warps.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from dcpmla.attention.hopper.compat import aggregate, barrier
from dcpmla.attention.hopper.pipeline import LN2, LOG2E, exp2
from dcpmla.attention.hopper.schedule import (
    HALF,
    LATENT,
    ROWS,
    find_request,
    is_whole,
    num_shared,
    sharing_parts,
    uniform,
)
from dcpmla.comm.kernels import landings

find_landing = gluon.jit(landings.find_landing.fn)
row_in_landing = gluon.jit(landings.row_in_landing.fn)
as_word = gluon.jit(landings.as_word.fn)

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


@aggregate
class Mail:
    """Numbers that determine a row's address in its owner's memory."""

    addresses_ptr: gl.tensor  # int64 [W], start of each rank's memory
    rows_at: gl.tensor  # offsets of the rows and of the words of this exchange's landing
    words_at: gl.tensor
    epoch: gl.tensor
    rank: gl.tensor
    own_heads: gl.base_value  # heads of a rank; a constexpr if it is 1
    num_rows: gl.tensor  # rows that each rank sends to an owner
    num_heads: gl.tensor  # heads of all ranks


@aggregate
class Outputs:
    """The memory that the output goes to.

    Rows whose program had all their keys go to out and lse, or with `mail` to their owners; other rows become partial
    outputs, which are counted on arrival.
    """

    out_ptr: gl.tensor  # [T, H, LATENT]
    lse_ptr: gl.tensor  # float32 [T, H]
    mail: gl.base_value  # Mail, or None
    partials_ptr: gl.tensor  # float32
    partial_lses_ptr: gl.tensor
    counters_ptr: gl.tensor  # int32 [lines, parts]


@gluon.jit
def open_mail(addresses_ptr, state_ptr, rank, own_heads, num_rows, num_heads, landing_bytes):
    """Return the `Mail` of the exchange that begins with this launch."""
    epoch = gl.load(state_ptr) + 1
    rows_at, words_at = find_landing(epoch, landing_bytes)
    return Mail(addresses_ptr, rows_at, words_at, epoch, rank, own_heads, num_rows, num_heads)


@gluon.jit
def _find_owner(mail, row):
    """Return the addresses of the owners of rows of (token, head), and the rows' numbers in the owners' landings."""
    token, head = row // mail.num_heads, row % mail.num_heads
    landed = row_in_landing(mail.rank, mail.num_rows, token * mail.own_heads) + head % mail.own_heads
    return gl.load(mail.addresses_ptr + head // mail.own_heads), landed.to(gl.int64)


@gluon.jit
def out_at(outputs, first_row, row, column):
    """Return pointers to columns [1, M] of rows first_row + [N, 1]."""
    if outputs.mail is not None:
        address, landed = _find_owner(outputs.mail, first_row + row)
        address = address + outputs.mail.rows_at + landed * (LATENT * 2)
        at = gl.multiple_of(address.to(gl.pointer_type(outputs.out_ptr.dtype.element_ty)), [16, 16]) + column
    else:
        # The last summand fits into the offset of an instruction.
        at = outputs.out_ptr + first_row.to(gl.int64) * LATENT + (row * LATENT + column)
    return at


@gluon.jit
def lse_of_row(outputs, lse):
    """Return the LSE to store with a computed row, never -inf if rows are sent.

    The owner would read -inf as a row that is not sent. All scores of such a row are -inf; compared with any other,
    its share is 0.
    """
    if outputs.mail is not None:
        lse = gl.where(lse == -float("inf"), -3.0e38, lse)
    return lse


@gluon.jit
def store_lse(outputs, first_row, row, lse, mask):
    """Store the LSE of rows first_row + [N]."""
    if outputs.mail is not None:
        address, landed = _find_owner(outputs.mail, first_row + row)
        address = (address + outputs.mail.words_at + landed * 8).to(gl.pointer_type(gl.int64))
        gl.store(address, as_word(lse, outputs.mail.epoch), mask=mask)
    else:
        gl.store(outputs.lse_ptr + first_row + row, lse, mask=mask)


@gluon.jit
def store_columns(outputs, first_row, num_rows, first_column, acc, buffer):
    """Store rows [first_row, first_row + num_rows), columns from first_column on, from acc [ROWS, M].

    They go through a buffer [ROWS, M] in shared memory, because from the registers of wgmma a warp would write to eight
    rows at a time.
    """
    lanes: gl.constexpr = acc.shape[1] // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])
    buffer.store(acc.to(buffer.dtype))
    barrier()
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    column = first_column + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, layout))
    at = out_at(outputs, first_row, gl.expand_dims(row, 1), gl.expand_dims(column, 0))
    gl.store(at, buffer.load(layout), mask=gl.expand_dims(row < num_rows, 1))
    fence_async_shared()  # before TMA fills the buffer again


@gluon.jit
def zero_empty(outputs, work):
    """Store (0, -inf) for this program's share of the requests without keys, which are in no part.

    Zeros are not sent: an owner expects no row with an LSE of -inf.
    """
    row = gl.arange(0, ROWS, layout=gl.BlockedLayout([1], [32], [4], [0]))
    column = gl.arange(0, LATENT, layout=gl.BlockedLayout([4], [32], [4], [0]))
    batch = work.batch
    for request in range(gl.program_id(1), work.num_reqs, gl.num_programs(1)):
        first_row, num_rows, num_keys = find_request(request, batch)
        if num_keys == 0:
            if outputs.mail is None:
                for empty in range(0, gl.minimum(num_rows, ROWS)):
                    at = out_at(outputs, first_row, empty, column)
                    gl.store(at, gl.full_like(column, 0, dtype=outputs.out_ptr.dtype.element_ty))
            store_lse(outputs, first_row, row, gl.full_like(row, -float("inf"), dtype=gl.float32), row < num_rows)


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
def store_partial(partials_ptr, partial, half, num_rows, acc):
    """Store half a partial output from acc [ROWS, HALF] straight from the registers of wgmma.

    A warp writes 512 contiguous bytes, so the columns of a group are out of order; `_in_order` restores the order.
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
def store_output(half: gl.constexpr, acc, row, lse, buffer, walk, segment, work, outputs):
    """Store half the output of a segment from acc [ROWS, HALF], and the LSE of its rows unless None.

    If other parts have the rest of the request's keys, it is a partial output.
    """
    first_row, num_rows = segment.first_row, segment.num_rows
    if is_whole(walk, segment):
        store_columns(outputs, first_row, num_rows, half * HALF, acc, buffer.index(0))
        if lse is not None:
            store_lse(outputs, first_row, row, lse_of_row(outputs, lse), row < num_rows)
    else:
        partial = find_partial(gl.program_id(1), walk.start == walk.begin, work.batch.line)
        if lse is not None:
            gl.store(outputs.partial_lses_ptr + partial * ROWS + row, lse)
        store_partial(outputs.partials_ptr, partial, half, num_rows, acc)
        arrive(outputs.counters_ptr, walk.begin, work)


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
    half,
    first_part,
    num_parts,
    first_row,
    start,
    stop,
    outputs,
    line,
    AT_ONCE: gl.constexpr,
    PARTS: gl.constexpr,
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
