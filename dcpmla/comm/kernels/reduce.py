"""Kernels of the all-reduce, with the residual addition and the RMSNorm that follow in a decoder block.

Rows [T, WIDTH] are cut into items of COLUMNS, numbered across rows, and sent through landings
(`comm.kernels.landings`). One-shot: a rank stores each item of its partial rows at all ranks, and all ranks sum it.
Two-shot: it stores an item at the rank that owns it, by the item's number; the owner sums it and stores the sum at all
ranks: two trips, with 2 / W of the bytes. Sums are in float32, either in the same order on all ranks or made by one
rank, so they have the same bits everywhere.

The norm of a row needs the squares of all its items, which several programs hold. Each program stores its items' sums
of squares in this GPU's memory, as words with the epoch, before it waits for the other programs'. This wait needs no
deadline: a GPU starts programs in order, so the programs of the row run already, or will once earlier rows are done;
and if a peer is missing, they continue after their own deadline.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dcpmla.comm.kernels.landings import (
    as_float,
    as_word,
    count_exchange,
    find_landing,
    give_up,
    next_epoch,
    now,
    own_address,
    peer_addresses,
    read_words,
)
from dcpmla.parallel.fp8 import empty_codes
from dcpmla.parallel.kernels.quantize import store_codes


@triton.jit
def _columns_of(item, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Return offsets [.., COLUMNS] of items [..] in rows [T, WIDTH], and a mask of the elements inside their row."""
    tiles: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    row, column = tl.cast(item // tiles, tl.int64), (item % tiles)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return row[:, None] * WIDTH + column, column < WIDTH


@triton.jit
def _in_landing(number, COLUMNS: tl.constexpr):
    """Return offsets [.., COLUMNS] of items [..] in a landing, by their numbers there."""
    return number[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def _take(
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
def _add(x, residual_ptr, at, mask, type: tl.constexpr):
    """Sum all ranks' items [N, COLUMNS] and the residual: return [1, COLUMNS], rounded once."""
    total = tl.sum(x.to(type, bitcast=True).to(tl.float32), 0)[None, :]
    if residual_ptr is not None:
        total += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return total.to(type)


@triton.jit
def _store_sums(sums, item, is_item, epoch, sums_ptr, weight_ptr, squares_ptr, WIDTH: tl.constexpr):
    """Store finished items [N, COLUMNS], zero past their rows' ends, and their sums of squares if a norm follows."""
    at, is_column = _columns_of(item, WIDTH, sums.shape[1])
    tl.store(sums_ptr + at, sums, mask=is_item[:, None] & is_column)
    if weight_ptr is not None:
        wide = sums.to(tl.float32)
        tl.store(squares_ptr + item, as_word(tl.sum(wide * wide, 1), epoch), mask=is_item)


@triton.jit
def _normalize(x, squares, weight, eps, WIDTH: tl.constexpr):
    """Return the norm of items by the sum of squares of their row, rounded as in `comm.norm.rms_norm`."""
    normed = (x.to(tl.float32) * tl.rsqrt(squares / WIDTH + eps)).to(x.dtype)
    return (normed.to(tl.float32) * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def _norm_items(
    first,
    last,
    epoch,
    sums_ptr,
    weight_ptr,
    normed_ptr,
    codes_ptr,
    scales_ptr,
    scales_stride,
    squares_ptr,
    eps,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Norm this program's items from first to last, each once the squares of its row have arrived."""
    if weight_ptr is not None:
        tiles: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
        tile = tl.arange(0, TILES)
        tl.debug_barrier()  # other threads may have stored the sums
        for item in range(first, last):
            squares, num_missing = tl.zeros([TILES], tl.int64), 1
            while num_missing != 0:
                squares = read_words(
                    squares_ptr + item // tiles * tiles + tile,
                    tile < tiles,
                    0.0,
                    epoch,
                    REPEAT=32 // TILES if TILES < 32 else 1,
                )
                num_missing = tl.max((squares == -1).to(tl.int32), 0)
            row, first_column = tl.cast(item // tiles, tl.int64), item % tiles * COLUMNS
            column = first_column + tl.arange(0, COLUMNS)
            at, mask = row * WIDTH + column, column < WIDTH
            x, weight = tl.load(sums_ptr + at, mask=mask), tl.load(weight_ptr + column, mask=mask)
            normed = _normalize(x, tl.sum(as_float(squares), 0), weight, eps, WIDTH)
            tl.store(normed_ptr + at, normed, mask=mask)
            if codes_ptr is not None:
                store_codes(normed, row, first_column, codes_ptr, scales_ptr, scales_stride, WIDTH)


@triton.jit(do_not_specialize=["num_items", "rank", "items", "limit", "operation", "scales_stride"])
def one_shot_kernel(
    partial_ptr,
    residual_ptr,
    weight_ptr,
    normed_ptr,
    codes_ptr,
    scales_ptr,
    scales_stride,
    sums_ptr,
    squares_ptr,
    addresses_ptr,
    state_ptr,
    fault_ptr,
    num_items,
    rank,
    items,
    landing_bytes,
    limit,
    operation,
    eps,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    PEERS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
    PROGRAMS: tl.constexpr,
    SHARE: tl.constexpr,
):
    """Store the items of this rank's rows at all ranks; sum and norm all ranks'. A program handles `items` items."""
    epoch = next_epoch(state_ptr)
    type: tl.constexpr = sums_ptr.dtype.element_ty
    carrier: tl.constexpr = partial_ptr.dtype.element_ty
    peer, one = tl.arange(0, PEERS), tl.zeros([1], tl.int32)
    is_peer = (peer < SIZE)[:, None]
    landing, _ = find_landing(epoch, landing_bytes)
    theirs = peer_addresses(addresses_ptr, landing, peer, SIZE, carrier)[:, None]
    mine = own_address(addresses_ptr, rank, landing, carrier)
    first = tl.program_id(0) * items
    last = tl.minimum(first + items, num_items)

    for item in range(first, last):
        at, is_column = _columns_of(item + one, WIDTH, COLUMNS)
        x = tl.load(partial_ptr + at, mask=is_column, other=0)
        x = tl.broadcast_to(tl.where(x == -1, -2, x), [PEERS, COLUMNS])  # both are NaN
        tl.store(theirs + _in_landing(rank * num_items + item + one, COLUMNS), x, mask=is_peer & is_column)

    deadline = count_exchange(epoch, state_ptr, limit, PROGRAMS, SHARE)
    for item in range(first, last):
        at, is_column = _columns_of(item + one, WIDTH, COLUMNS)
        landed, mask = mine + _in_landing(peer * num_items + item, COLUMNS), is_peer & is_column
        x = _take(landed, mask, peer, epoch, operation, deadline, state_ptr, fault_ptr, carrier, PROGRAMS)
        sums = _add(x, residual_ptr, at, is_column, type)
        _store_sums(sums, item + one, one == 0, epoch, sums_ptr, weight_ptr, squares_ptr, WIDTH)
    # fmt: off
    _norm_items(
        first, last, epoch, sums_ptr, weight_ptr, normed_ptr, codes_ptr, scales_ptr, scales_stride, squares_ptr, eps,
        WIDTH, COLUMNS, TILES,
    )
    # fmt: on


@triton.jit(
    do_not_specialize=["num_items", "rank", "items", "limit", "operation", "scales_stride"],
    do_not_specialize_on_alignment=["scales_ptr"],  # a pointer to the first row of a chunk
)
def two_shot_kernel(
    partial_ptr,
    residual_ptr,
    weight_ptr,
    normed_ptr,
    codes_ptr,
    scales_ptr,
    scales_stride,
    sums_ptr,
    squares_ptr,
    addresses_ptr,
    state_ptr,
    fault_ptr,
    num_items,
    rank,
    items,
    landing_bytes,
    limit,
    operation,
    eps,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    PEERS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
    PROGRAMS: tl.constexpr,
    SHARE: tl.constexpr,
):
    """Store items at their owners, which sum them, add the residual and store the sums at all ranks; norm all items.

    A unit is SIZE items, one of each owner; a program does `items` / SIZE units.
    """
    epoch = next_epoch(state_ptr)
    type: tl.constexpr = sums_ptr.dtype.element_ty
    carrier: tl.constexpr = partial_ptr.dtype.element_ty
    peer, one = tl.arange(0, PEERS), tl.zeros([1], tl.int32)
    is_peer = peer < SIZE
    landing, _ = find_landing(epoch, landing_bytes)
    theirs = peer_addresses(addresses_ptr, landing, peer, SIZE, carrier)[:, None]
    mine = own_address(addresses_ptr, rank, landing, carrier)
    num_units = tl.cdiv(num_items, SIZE)
    num_partial = num_units * SIZE  # items in a landing, before the sums
    first = tl.program_id(0) * (items // SIZE)
    last = tl.minimum(first + items // SIZE, num_units)

    for unit in range(first, last):
        item = unit * SIZE + peer
        at, is_column = _columns_of(item, WIDTH, COLUMNS)
        mask = (is_peer & (item < num_items))[:, None] & is_column
        x = tl.load(partial_ptr + at, mask=mask, other=0)
        x = tl.where(x == -1, -2, x)  # both are NaN
        tl.store(theirs + _in_landing(rank * num_units + unit + one, COLUMNS), x, mask=mask)

    deadline = count_exchange(epoch, state_ptr, limit, PROGRAMS, SHARE)
    for unit in range(first, last):
        item = unit * SIZE + rank + one
        at, is_column = _columns_of(item, WIDTH, COLUMNS)
        is_column = is_column & (item < num_items)[:, None]
        landed, mask = mine + _in_landing(peer * num_units + unit, COLUMNS), is_peer[:, None] & is_column
        x = _take(landed, mask, peer, epoch, operation, deadline, state_ptr, fault_ptr, carrier, PROGRAMS)
        sums = _add(x, residual_ptr, at, is_column, type).to(carrier, bitcast=True)
        sums = tl.broadcast_to(tl.where(sums == -1, -2, sums), [PEERS, COLUMNS])
        tl.store(theirs + _in_landing(num_partial + item, COLUMNS), sums, mask=mask)

    for unit in range(first, last):
        item = unit * SIZE + peer
        is_item = is_peer & (item < num_items)
        at, is_column = _columns_of(item, WIDTH, COLUMNS)
        landed, mask = mine + _in_landing(num_partial + item, COLUMNS), is_item[:, None] & is_column
        x = _take(landed, mask, peer, epoch, operation, deadline, state_ptr, fault_ptr, carrier, PROGRAMS)
        sums = x.to(type, bitcast=True)
        _store_sums(sums, item, is_item, epoch, sums_ptr, weight_ptr, squares_ptr, WIDTH)
    last = tl.minimum(last * SIZE, num_items)
    # fmt: off
    _norm_items(
        first * SIZE, last, epoch, sums_ptr, weight_ptr, normed_ptr, codes_ptr, scales_ptr, scales_stride, squares_ptr,
        eps, WIDTH, COLUMNS, TILES,
    )
    # fmt: on


@triton.jit(do_not_specialize=["scales_stride"])
def add_norm_kernel(
    partial_ptr,
    residual_ptr,
    weight_ptr,
    normed_ptr,
    codes_ptr,
    scales_ptr,
    scales_stride,
    sums_ptr,
    eps,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add a row of partial and residual [T, WIDTH], rounded once, and norm it: one program a row."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS)
    at, mask = row * WIDTH + column, column < WIDTH
    total = tl.load(partial_ptr + at, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    sums = total.to(sums_ptr.dtype.element_ty)
    tl.store(sums_ptr + at, sums, mask=mask)
    wide = sums.to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0)
    normed = _normalize(sums, tl.sum(wide * wide, 0), weight, eps, WIDTH)
    tl.store(normed_ptr + at, normed, mask=mask)
    if codes_ptr is not None:
        store_codes(normed, row, 0, codes_ptr, scales_ptr, scales_stride, WIDTH)


def add_norm(
    partial: Tensor, residual: Tensor, weight: Tensor, eps: float, quantizes: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `comm.norm.add_norm` in one kernel."""
    partial, residual = partial.contiguous(), residual.contiguous()
    normed, sums = torch.empty_like(residual), torch.empty_like(residual)
    codes, scales = empty_codes(normed, quantizes)
    num_tokens, width = residual.shape
    columns = triton.next_power_of_2(width)
    if num_tokens:
        add_norm_kernel[(num_tokens,)](
            partial,
            residual,
            weight,
            normed,
            codes if quantizes else None,
            scales if quantizes else None,
            scales.stride(1),
            sums,
            eps,
            WIDTH=width,
            COLUMNS=columns,
            num_warps=min(max(1, columns // 512), 16),
        )
    return normed, sums, codes, scales
