"""Outputs of Hopper's decode kernel: rows into tensors or to the ranks that own their heads, and partial outputs.

A row that is sent lands where `comm.kernels.landings.combine_kernel` would store it: this is that kernel's first half,
done as soon as a row is known.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from dcpmla.attention.hopper.compat import aggregate, barrier
from dcpmla.attention.hopper.schedule import HALF, LATENT, ROWS, find_request
from dcpmla.comm.kernels import landings

find_landing = gluon.jit(landings.find_landing.fn)
row_in_landing = gluon.jit(landings.row_in_landing.fn)
as_word = gluon.jit(landings.as_word.fn)

GROUP = gl.constexpr(16)  # columns that lie together in a partial output
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
    """What a row's address in its owner's memory follows from."""

    addresses_ptr: gl.tensor  # int64 [W], where each rank's memory begins
    rows_at: gl.tensor  # offsets of the rows and of the words of this exchange's landing
    words_at: gl.tensor
    epoch: gl.tensor
    rank: gl.tensor
    own_heads: gl.base_value  # heads of a rank; a constexpr where it is 1
    num_rows: gl.tensor  # rows that each rank sends to an owner
    num_heads: gl.tensor  # heads of all ranks


@aggregate
class Outputs:
    """Where the output goes.

    Rows whose program saw all keys go to out and lse, or with `mail` to their owners; other rows become partial
    outputs, which are counted as they arrive.
    """

    out_ptr: gl.tensor  # [T, H, LATENT]
    lse_ptr: gl.tensor  # float32 [T, H]
    mail: gl.base_value  # Mail, or None
    partials_ptr: gl.tensor  # float32
    partial_lses_ptr: gl.tensor
    counters_ptr: gl.tensor  # int32 [tiles of rows, parts]


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
        # What is added last fits into the offset of an instruction.
        at = outputs.out_ptr + first_row.to(gl.int64) * LATENT + (row * LATENT + column)
    return at


@gluon.jit
def lse_of_row(outputs, lse):
    """Return the LSE to store with a row that was computed: never -inf where rows are sent.

    The owner would take -inf for a row that does not come. All scores of such a row are -inf; compared with any other,
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

    They go through a buffer [ROWS, M] in shared memory: from the registers of wgmma, a warp would write to eight rows
    at a time.
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
    """Store (0, -inf) for the requests without keys that fall to this program: they lie in no part.

    Zeros are not sent: an owner expects no row with an LSE of -inf.
    """
    row = gl.arange(0, ROWS, layout=gl.BlockedLayout([1], [32], [4], [0]))
    column = gl.arange(0, LATENT, layout=gl.BlockedLayout([4], [32], [4], [0]))
    batch = work.batch
    for request in range(gl.program_id(0), work.num_reqs, gl.num_programs(0)):
        first, num_rows, num_keys = find_request(request, batch)
        if num_keys == 0:
            first_row = first * batch.num_heads + batch.row_tile * ROWS
            if outputs.mail is None:
                for empty in range(0, gl.minimum(num_rows, ROWS)):
                    at = out_at(outputs, first_row, empty, column)
                    gl.store(at, gl.full_like(column, 0, dtype=outputs.out_ptr.dtype.element_ty))
            store_lse(outputs, first_row, row, gl.full_like(row, -float("inf"), dtype=gl.float32), row < num_rows)


@gluon.jit
def find_partial(part, begins, row_tile):
    """Return the number of a part's partial output.

    It may leave two: of a request that it goes on with, and of one that it begins.
    """
    return (row_tile * gl.num_programs(0) + part) * 2 + begins.to(gl.int32)


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

    A warp writes 512 contiguous bytes, which leaves the columns of a group out of order: `merge` restores it.
    """
    values = acc.reshape([ROWS, HALF // GROUP, 2, 4, 2]).permute((1, 0, 3, 2, 4)).reshape([HALF // GROUP, ROWS * 4, 4])
    group = gl.arange(0, HALF // GROUP, layout=gl.SliceLayout(1, gl.SliceLayout(2, QUARTERS)))
    quarter = gl.arange(0, ROWS * 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, QUARTERS)))
    column = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, QUARTERS)))
    at = gl.expand_dims(gl.expand_dims(group * (ROWS * GROUP), 1) + gl.expand_dims(quarter * 4, 0), 2)
    at += gl.expand_dims(gl.expand_dims(column, 0), 1)
    is_row = gl.expand_dims(gl.expand_dims(quarter // 4 < num_rows, 0), 2)
    gl.store(partials_ptr + partial_at(partial, half, 0, 0) + at, gl.convert_layout(values, QUARTERS), mask=is_row)
