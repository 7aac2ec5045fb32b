"""Outputs of Hopper's decode kernel: rows into tensors or to the ranks that own their heads, or partial outputs.

A row that is sent is stored where `comm.kernels.exchange.combine_kernel` would store it: this is that kernel's first
half, done as soon as a row is computed.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from dcpmla.attention.hopper.compat import aggregate, barrier
from dcpmla.attention.hopper.partials import arrive, find_partial, store_partial
from dcpmla.attention.hopper.schedule import HALF, LATENT, ROWS, find_request, is_whole
from dcpmla.comm.kernels import landings

find_landing = gluon.jit(landings.find_landing.fn)
row_in_landing = gluon.jit(landings.row_in_landing.fn)
as_word = gluon.jit(landings.as_word.fn)


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
def _store_piece(outputs, first_row, num_rows, first_column, acc, buffer):
    """Store columns from first_column on, from acc [ROWS, M], by way of a buffer of that shape."""
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
def store_columns(outputs, first_row, num_rows, first_column, acc, buffer):
    """Store rows [first_row, first_row + num_rows), columns from first_column on, from acc [ROWS, HALF].

    They go through a buffer in shared memory, because from the registers of wgmma a warp would write to eight rows at a
    time. An acc [HALF, ROWS] goes in two pieces through a buffer of half the columns.
    """
    if acc.shape[0] == HALF:
        pieces = acc.permute((1, 0)).reshape([ROWS, 2, HALF // 2]).permute((0, 2, 1))
        first, second = pieces.split()
        _store_piece(outputs, first_row, num_rows, first_column, first, buffer)
        barrier()  # all have read the first piece
        _store_piece(outputs, first_row, num_rows, first_column + HALF // 2, second, buffer)
    else:
        _store_piece(outputs, first_row, num_rows, first_column, acc, buffer)


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
def store_output(half: gl.constexpr, acc, row, lse, buffer, walk, segment, work, outputs):
    """Store half the output of a segment from acc [ROWS, HALF], or [HALF, ROWS], and the LSE of its rows unless None.

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
        store_partial(outputs.partials_ptr, partial * ROWS, half, ROWS, num_rows, acc)
        arrive(outputs.counters_ptr, walk.begin, work)
