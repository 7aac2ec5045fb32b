"""Kernels of the all-reduce, with the residual addition and the RMSNorm that follow in a decoder block.

Rows [T, WIDTH] are cut into items of COLUMNS, numbered across rows, and sent through landings
(`comm.kernels.landings`). One-shot: a rank stores each item of its partial rows at all ranks, and all ranks sum it.
Two-shot: it stores an item at the rank that owns it, by the item's number; the owner sums it and stores the sum at all
ranks: two trips, with 2 / W of the bytes. A rank's partial row is the sum of TERMS terms, rounded once
(`comm.terms.Terms`), unless TERMS is 0. Sums are in float32, either in the same order on all ranks or made by one rank,
so they have the same bits everywhere. With IN_ORDER they are in rank order, whatever COLUMNS is.

`comm.kernels.items` has the steps of both kernels.
"""

import triton
import triton.language as tl

from dcpmla.comm.kernels.items import add, columns_of, in_landing, load_items, norm_items, store_sums, take
from dcpmla.comm.kernels.landings import count_exchange, find_landing, next_epoch, own_address, peer_addresses


@triton.jit(
    do_not_specialize=["num_ids", "num_items", "rank", "items", "limit", "operation", "scales_stride"],
    do_not_specialize_on_alignment=["ids_ptr"],  # a pointer to the first row of a chunk
)
def one_shot_kernel(
    partial_ptr,
    ids_ptr,
    num_ids,
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
    IN_ORDER: tl.constexpr,
    TERMS: tl.constexpr,
):
    """Store the items of this rank's rows at all ranks; sum and norm all ranks'. A program handles `items` items."""
    epoch = next_epoch(state_ptr)
    type: tl.constexpr = sums_ptr.dtype.element_ty
    partial = (partial_ptr, ids_ptr, num_ids)
    carrier: tl.constexpr = partial_ptr.dtype.element_ty
    peer, one = tl.arange(0, PEERS), tl.zeros([1], tl.int32)
    is_peer = (peer < SIZE)[:, None]
    landing, _ = find_landing(epoch, landing_bytes)
    theirs = peer_addresses(addresses_ptr, landing, peer, SIZE, carrier)[:, None]
    mine = own_address(addresses_ptr, rank, landing, carrier)
    first = tl.program_id(0) * items
    last = tl.minimum(first + items, num_items)

    for item in range(first, last):
        x, mask = load_items(partial, item + one, one == 0, type, WIDTH, COLUMNS, TERMS)
        x = tl.broadcast_to(x, [PEERS, COLUMNS])
        tl.store(theirs + in_landing(rank * num_items + item + one, COLUMNS), x, mask=is_peer & mask)

    deadline = count_exchange(epoch, state_ptr, limit, PROGRAMS)
    for item in range(first, last):
        at, is_column = columns_of(item + one, WIDTH, COLUMNS)
        landed, mask = mine + in_landing(peer * num_items + item, COLUMNS), is_peer & is_column
        x = take(landed, mask, peer, epoch, operation, deadline, state_ptr, fault_ptr, carrier, PROGRAMS)
        sums = add(x, residual_ptr, at, is_column, type, IN_ORDER)
        store_sums(sums, item + one, one == 0, epoch, sums_ptr, weight_ptr, squares_ptr, WIDTH)
    norm = (weight_ptr, normed_ptr, codes_ptr, scales_ptr, scales_stride, squares_ptr, eps)
    norm_items(first, last, epoch, sums_ptr, norm, WIDTH, COLUMNS, TILES)


@triton.jit(
    do_not_specialize=["num_ids", "num_items", "rank", "items", "limit", "operation", "scales_stride"],
    do_not_specialize_on_alignment=["ids_ptr", "scales_ptr"],  # pointers to the first row of a chunk
)
def two_shot_kernel(
    partial_ptr,
    ids_ptr,
    num_ids,
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
    IN_ORDER: tl.constexpr,
    TERMS: tl.constexpr,
):
    """Store items at their owners, which sum them, add the residual and store the sums at all ranks; norm all items.

    A unit is SIZE items, one of each owner; a program does `items` / SIZE units.
    """
    epoch = next_epoch(state_ptr)
    type: tl.constexpr = sums_ptr.dtype.element_ty
    partial = (partial_ptr, ids_ptr, num_ids)
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
        x, mask = load_items(partial, item, is_peer & (item < num_items), type, WIDTH, COLUMNS, TERMS)
        tl.store(theirs + in_landing(rank * num_units + unit + one, COLUMNS), x, mask=mask)

    deadline = count_exchange(epoch, state_ptr, limit, PROGRAMS)
    for unit in range(first, last):
        item = unit * SIZE + rank + one
        at, is_column = columns_of(item, WIDTH, COLUMNS)
        is_column = is_column & (item < num_items)[:, None]
        landed, mask = mine + in_landing(peer * num_units + unit, COLUMNS), is_peer[:, None] & is_column
        x = take(landed, mask, peer, epoch, operation, deadline, state_ptr, fault_ptr, carrier, PROGRAMS)
        sums = add(x, residual_ptr, at, is_column, type, IN_ORDER).to(carrier, bitcast=True)
        sums = tl.broadcast_to(tl.where(sums == -1, -2, sums), [PEERS, COLUMNS])
        tl.store(theirs + in_landing(num_partial + item, COLUMNS), sums, mask=mask)

    for unit in range(first, last):
        item = unit * SIZE + peer
        is_item = is_peer & (item < num_items)
        at, is_column = columns_of(item, WIDTH, COLUMNS)
        landed, mask = mine + in_landing(num_partial + item, COLUMNS), is_item[:, None] & is_column
        x = take(landed, mask, peer, epoch, operation, deadline, state_ptr, fault_ptr, carrier, PROGRAMS)
        sums = x.to(type, bitcast=True)
        store_sums(sums, item, is_item, epoch, sums_ptr, weight_ptr, squares_ptr, WIDTH)
    norm = (weight_ptr, normed_ptr, codes_ptr, scales_ptr, scales_stride, squares_ptr, eps)
    norm_items(first * SIZE, tl.minimum(last * SIZE, num_items), epoch, sums_ptr, norm, WIDTH, COLUMNS, TILES)
