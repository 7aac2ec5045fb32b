"""Where Hopper's decode kernel writes output rows: into tensors, or into the memory of the ranks that own their heads.

There, a row is what `comm.kernels.landings.combine_kernel` would send: this is its first half, done as soon as a row
is known.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dcpmla.attention.hopper.split import LATENT


@gluon.jit
def address_mail(addresses_ptr, state_ptr, rank, own_heads, num_rows, num_heads, landing_bytes):
    """What a row's place at its owner follows from; `comm.kernels.landings.find_landing` says where the landings lie."""
    epoch = gl.load(state_ptr) + 1
    rows_at = (epoch & 1) * landing_bytes
    words_at = 2 * landing_bytes + (epoch & 1) * (landing_bytes // 8)
    return addresses_ptr, rows_at, words_at, epoch, rank, own_heads, num_rows, num_heads


@gluon.jit
def _find_place(mail, row):
    """Of rows of (token, head): the memory of the owner, and which row it is of those that come to it from all ranks."""
    addresses_ptr, _, _, _, rank, own_heads, num_rows, num_heads = mail
    token, head = row // num_heads, row % num_heads
    place = rank * num_rows + token * own_heads + head % own_heads
    return gl.load(addresses_ptr + head // own_heads), place.to(gl.int64)


@gluon.jit
def out_at(dest, first_row, row, column, IS_SENT: gl.constexpr):
    """Pointers to columns [1, M] of rows first_row + [N, 1]."""
    out_ptr, _, mail = dest
    if IS_SENT:
        memory, place = _find_place(mail, first_row + row)
        address = memory + mail[1] + place * (LATENT * 2)
        at = gl.multiple_of(address.to(gl.pointer_type(out_ptr.dtype.element_ty)), [16, 16]) + column
    else:
        at = (
            out_ptr + first_row.to(gl.int64) * LATENT + (row * LATENT + column)
        )  # what is added last fits into an instruction
    return at


@gluon.jit
def lse_of_row(lse, IS_SENT: gl.constexpr):
    """The LSE that goes with a row.

    Where the row is sent, it may not say that there is none: no one would await the row.
    """
    if IS_SENT:
        lse = gl.where(
            lse == -float("inf"), -3.0e38, lse
        )  # scores that are all -inf; beside any others, its share is 0
    return lse


@gluon.jit
def store_lse(dest, first_row, row, lse, mask, IS_SENT: gl.constexpr):
    """The LSE of rows first_row + [N]."""
    _, lse_ptr, mail = dest
    if IS_SENT:
        memory, place = _find_place(mail, first_row + row)
        address = (memory + mail[2] + place * 8).to(gl.pointer_type(gl.int64))
        word = (lse.to(gl.int32, bitcast=True).to(gl.int64) & 0xFFFFFFFF) | (mail[3].to(gl.int64) << 32)
        gl.store(address, word, mask=mask)
    else:
        gl.store(lse_ptr + first_row + row, lse, mask=mask)
