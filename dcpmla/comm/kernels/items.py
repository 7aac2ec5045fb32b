"""Steps of the all-reduce over items, COLUMNS of rows [T, WIDTH], numbered across rows (`comm.kernels.reduce`).

The norm of a row needs the squares of all its items, which several programs hold. Each program stores its items' sums
of squares in this GPU's memory, as words with the epoch, before it waits for the other programs'. This wait needs no
deadline: a GPU starts programs in order, so the programs of the row run already, or will once earlier rows are done;
and if a peer is missing, they continue after their own deadline.
"""

import triton
import triton.language as tl

from dcpmla.comm.kernels.landings import as_float, as_word, give_up, now, read_words
from dcpmla.comm.kernels.norm import normalize
from dcpmla.comm.kernels.terms import load_sum
from dcpmla.parallel.kernels.quantize import store_codes


@triton.jit
def columns_of(item, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Return offsets [.., COLUMNS] of items [..] in rows [T, WIDTH], and a mask of the elements inside their row."""
    tiles: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    row, column = tl.cast(item // tiles, tl.int64), (item % tiles)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return row[:, None] * WIDTH + column, column < WIDTH


@triton.jit
def load_items(
    partial, item, is_item, type: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, TERMS: tl.constexpr
):
    """Return this rank's items [N, COLUMNS] as integers other than -1, and the mask of their elements.

    partial: partial_ptr, ids_ptr and num_ids of the kernels.
    """
    partial_ptr, ids_ptr, num_ids = partial
    carrier: tl.constexpr = partial_ptr.dtype.element_ty
    at, is_column = columns_of(item, WIDTH, COLUMNS)
    mask = is_item[:, None] & is_column
    if TERMS == 0:
        x = tl.load(partial_ptr + at, mask=mask, other=0)
    else:
        tiles: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
        row = tl.cast(tl.where(is_item, item, 0) // tiles, tl.int64)[:, None]
        x = load_sum(partial_ptr, ids_ptr, num_ids, row, at, mask, type, WIDTH, TERMS)
        x = x.to(type).to(carrier, bitcast=True)
    return tl.where(x == -1, -2, x), mask  # both are NaN


@triton.jit
def in_landing(number, COLUMNS: tl.constexpr):
    """Return offsets [.., COLUMNS] of items [..] in a landing, by their numbers there."""
    return number[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def take(
    at, mask, peer, epoch, operation, deadline, state_ptr, fault_ptr, carrier: tl.constexpr, PROGRAMS: tl.constexpr
):
    """Wait for items [N, COLUMNS] that peers [N] store in a landing, reset it, and return the items as integers."""
    x = tl.full(at.shape, -1, carrier)
    num_missing, is_early = 1, True
    while (num_missing != 0) & is_early:
        x = tl.load(at, mask=mask, other=0, volatile=True)
        num_missing = tl.max((x == -1).to(tl.int32), None)
        is_early = now() < deadline
    if num_missing != 0:
        give_up(tl.max((x == -1).to(tl.int32), 1) != 0, peer, epoch, operation, state_ptr, fault_ptr, PROGRAMS)
    tl.store(at, tl.full(at.shape, -1, carrier), mask=mask)
    return x


@triton.jit
def add(x, residual_ptr, at, mask, type: tl.constexpr, IN_ORDER: tl.constexpr):
    """Sum all ranks' items [N, COLUMNS] and the residual: return [1, COLUMNS], rounded once.

    The order of `tl.sum` depends on N and COLUMNS; IN_ORDER adds rank after rank.
    """
    wide = x.to(type, bitcast=True).to(tl.float32)
    if IN_ORDER:
        total, rank = tl.zeros([1, x.shape[1]], tl.float32), tl.arange(0, x.shape[0])[:, None]
        for i in tl.static_range(x.shape[0]):
            total += tl.sum(tl.where(rank == i, wide, 0.0), 0)[None, :]
    else:
        total = tl.sum(wide, 0)[None, :]
    if residual_ptr is not None:
        total += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return total.to(type)


@triton.jit
def store_sums(sums, item, is_item, epoch, sums_ptr, weight_ptr, squares_ptr, WIDTH: tl.constexpr):
    """Store finished items [N, COLUMNS], zero past their rows' ends, and their sums of squares if a norm follows."""
    at, is_column = columns_of(item, WIDTH, sums.shape[1])
    tl.store(sums_ptr + at, sums, mask=is_item[:, None] & is_column)
    if weight_ptr is not None:
        wide = sums.to(tl.float32)
        tl.store(squares_ptr + item, as_word(tl.sum(wide * wide, 1), epoch), mask=is_item)


@triton.jit
def norm_items(first, last, epoch, sums_ptr, norm, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr):
    """Norm this program's items from first to last, each once the squares of its row have arrived.

    norm: weight_ptr (None for no norm), normed_ptr, codes_ptr, scales_ptr, scales_stride, squares_ptr and eps of the
    kernels.
    """
    weight_ptr, normed_ptr, codes_ptr, scales_ptr, scales_stride, squares_ptr, eps = norm
    if weight_ptr is not None:
        tiles: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
        tile = tl.arange(0, TILES)
        tl.debug_barrier()  # other threads may have stored the sums
        for item in range(first, last):
            squares, num_missing = tl.zeros([TILES], tl.int64), 1
            while num_missing != 0:
                squares = read_words(squares_ptr + item // tiles * tiles + tile, tile < tiles, 0.0, epoch)
                num_missing = tl.max((squares == -1).to(tl.int32), 0)
            row, first_column = tl.cast(item // tiles, tl.int64), item % tiles * COLUMNS
            column = first_column + tl.arange(0, COLUMNS)
            at, mask = row * WIDTH + column, column < WIDTH
            x, weight = tl.load(sums_ptr + at, mask=mask), tl.load(weight_ptr + column, mask=mask)
            normed = normalize(x, tl.sum(as_float(squares), 0), weight, eps, WIDTH)
            tl.store(normed_ptr + at, normed, mask=mask)
            if codes_ptr is not None:
                store_codes(normed, row, first_column, codes_ptr, scales_ptr, scales_stride, WIDTH)
