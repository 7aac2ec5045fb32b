"""Kernels of the exchange `direct` over landings: queries of all ranks' heads gathered, and partial rows merged."""

import triton
import triton.language as tl

from dcpmla.comm.kernels.landings import (
    as_float,
    as_word,
    count_exchange,
    dequantize,
    find_landing,
    give_up,
    next_epoch,
    now,
    own_address,
    peer_addresses,
    quantize,
    read_words,
    row_in_landing,
)
from dcpmla.comm.kernels.merge import shares
from dcpmla.comm.kernels.merge_tree import merge_tree


# Sizes vary from batch to batch: specialized variants would be compiled while requests wait.
@triton.jit(do_not_specialize=["num_tokens", "rank", "items", "limit", "operation"])
def gather_kernel(
    q_ptr,
    gathered_ptr,
    addresses_ptr,
    state_ptr,
    fault_ptr,
    num_tokens,
    token_stride,
    rank,
    items,
    landing_bytes,
    limit,
    operation,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    PEERS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_FP8: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Gather rows [T, WIDTH] of each rank -> [T, SIZE, WIDTH].

    An item is COLUMNS of a token's row; a program handles `items` items.
    """
    epoch = next_epoch(state_ptr)
    type: tl.constexpr = gathered_ptr.dtype.element_ty
    carrier: tl.constexpr = tl.int8 if IS_FP8 else q_ptr.dtype.element_ty
    tiles: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    peer = tl.arange(0, PEERS)
    is_peer = peer < SIZE
    rows_at, scales_at = find_landing(epoch, landing_bytes)
    peer_rows = peer_addresses(addresses_ptr, rows_at, peer, SIZE, carrier)
    peer_scales = peer_addresses(addresses_ptr, scales_at, peer, SIZE, tl.int64)
    my_rows = own_address(addresses_ptr, rank, rows_at, carrier)
    my_scales = own_address(addresses_ptr, rank, scales_at, tl.int64)
    first = tl.program_id(0) * items
    last = tl.minimum(first + items, num_tokens * tiles)

    for item in range(first, last):
        token, tile = tl.cast(item // tiles, tl.int64), item % tiles
        column = tile * COLUMNS + tl.arange(0, COLUMNS)
        is_column = (column < WIDTH)[None, :]
        x = tl.load(q_ptr + token * token_stride + column[None, :], mask=is_column, other=0)
        x, scale = quantize(x, type, IS_FP8)
        own = row_in_landing(rank, num_tokens, token)
        at = peer_rows[:, None] + (own * WIDTH + column)[None, :]
        tl.store(at, tl.broadcast_to(x, [PEERS, COLUMNS]), mask=is_peer[:, None] & is_column)
        if IS_FP8:
            tl.store(peer_scales + own * tiles + tile, tl.broadcast_to(as_word(scale, epoch), [PEERS]), mask=is_peer)

    deadline = count_exchange(epoch, state_ptr, limit, PROGRAMS)
    for item in range(first, last):
        token, tile = tl.cast(item // tiles, tl.int64), item % tiles
        column = tile * COLUMNS + tl.arange(0, COLUMNS)
        mask = is_peer[:, None] & (column < WIDTH)[None, :]
        landed = row_in_landing(peer, num_tokens, token)
        at = my_rows + (landed[:, None] * WIDTH + column[None, :])
        x = tl.full([PEERS, COLUMNS], -1, carrier)
        scale = tl.zeros([PEERS], tl.int64)
        num_missing, is_early = 1, True
        while (num_missing != 0) & is_early:
            if IS_FP8:
                scale = read_words(my_scales + landed * tiles + tile, is_peer, 1.0, epoch)
            x = tl.load(at, mask=mask, other=0, volatile=True)
            num_missing = tl.max(((scale == -1)[:, None] | (x == -1)).to(tl.int32), None)
            is_early = now() < deadline
        if num_missing != 0:
            is_missing = (scale == -1) | (tl.max((x == -1).to(tl.int32), 1) != 0)
            give_up(is_missing, peer, epoch, operation, state_ptr, fault_ptr, PROGRAMS)
        tl.store(at, tl.full([PEERS, COLUMNS], -1, carrier), mask=mask)
        # Rows that are sent unchanged are not converted through float32: they may be pairs of bytes.
        q = dequantize(x, as_float(scale), type, IS_FP8).to(type) if IS_FP8 else x.to(type, bitcast=True)
        tl.store(gathered_ptr + ((token * SIZE + peer)[:, None] * WIDTH + column[None, :]), q, mask=mask)


@triton.jit(do_not_specialize=["num_rows", "lse_stride_token", "lse_stride_head", "rank", "items", "limit"])
def combine_kernel(
    out_ptr,
    lse_ptr,
    merged_ptr,
    merged_lse_ptr,
    addresses_ptr,
    state_ptr,
    fault_ptr,
    num_rows,
    num_heads,
    out_stride_token,
    out_stride_head,
    lse_stride_token,
    lse_stride_head,
    rank,
    items,
    landing_bytes,
    limit,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    PEERS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_FP8: tl.constexpr,
    IS_SENT: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Merge partial rows [T, SIZE h, WIDTH] of each rank -> rows [T, h, WIDTH] of its own heads.

    Rows in float32, which deterministic attention sends, are merged by a tree, narrower ones by their shares.

    An item is COLUMNS of a merged row; a program handles `items` items. IS_SENT: An attention kernel has sent the rows
    (`attention.hopper.outputs`); this kernel only waits for the rows and merges them.
    """
    epoch = next_epoch(state_ptr)
    type: tl.constexpr = merged_ptr.dtype.element_ty
    carrier: tl.constexpr = tl.int8 if IS_FP8 else out_ptr.dtype.element_ty
    tiles: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    peer = tl.arange(0, PEERS)
    is_peer = peer < SIZE
    rows_at, lses_at = find_landing(epoch, landing_bytes)
    peer_rows = peer_addresses(addresses_ptr, rows_at, peer, SIZE, carrier)
    peer_lses = peer_addresses(addresses_ptr, lses_at, peer, SIZE, tl.int64)
    my_rows = own_address(addresses_ptr, rank, rows_at, carrier)
    my_lses = own_address(addresses_ptr, rank, lses_at, tl.int64)
    peer_scales, my_scales = peer_lses + SIZE * num_rows, my_lses + SIZE * num_rows
    first = tl.program_id(0) * items
    last = tl.minimum(first + items, num_rows * tiles)

    for item in range(first, first if IS_SENT else last):
        row, tile = tl.cast(item // tiles, tl.int64), item % tiles
        token, head = row // num_heads, peer * num_heads + row % num_heads
        column = tile * COLUMNS + tl.arange(0, COLUMNS)
        lse = tl.load(lse_ptr + token * lse_stride_token + head * lse_stride_head, mask=is_peer, other=-float("inf"))
        # Rows of an empty shard are not sent, and receivers do not wait for them.
        mask = (lse != -float("inf"))[:, None] & (column < WIDTH)[None, :]
        out_at = (token * out_stride_token + head * out_stride_head)[:, None] + column[None, :]
        x, scale = quantize(tl.load(out_ptr + out_at, mask=mask, other=0), type, IS_FP8)
        own = row_in_landing(rank, num_rows, row)
        tl.store(peer_rows[:, None] + (own * WIDTH + column)[None, :], x, mask=mask)
        if tile == 0:
            tl.store(peer_lses + own, as_word(lse, epoch), mask=is_peer)
        if IS_FP8:
            tl.store(peer_scales + own * tiles + tile, as_word(scale, epoch), mask=is_peer)

    deadline = count_exchange(epoch, state_ptr, limit, PROGRAMS)
    for item in range(first, last):
        row, tile = tl.cast(item // tiles, tl.int64), item % tiles
        column = tile * COLUMNS + tl.arange(0, COLUMNS)
        mask = is_peer[:, None] & (column < WIDTH)[None, :]
        landed = row_in_landing(peer, num_rows, row)
        at = my_rows + (landed[:, None] * WIDTH + column[None, :])
        x = tl.full([PEERS, COLUMNS], -1, carrier)
        lse, scale = tl.zeros([PEERS], tl.int64), tl.zeros([PEERS], tl.int64)
        num_missing, is_early = 1, True
        while (num_missing != 0) & is_early:
            lse = read_words(my_lses + landed, is_peer, -float("inf"), epoch)
            if IS_FP8:
                scale = read_words(my_scales + landed * tiles + tile, is_peer, 1.0, epoch)
            x = tl.load(at, mask=mask, other=0, volatile=True)
            is_missing = (lse == -1) | (scale == -1)
            has_row = as_float(lse) != -float("inf")
            num_missing = tl.max((is_missing[:, None] | (has_row[:, None] & (x == -1))).to(tl.int32), None)
            is_early = now() < deadline
        has_row = as_float(lse) != -float("inf")
        if num_missing != 0:
            is_missing = (lse == -1) | (scale == -1) | (has_row & (tl.max((x == -1).to(tl.int32), 1) != 0))
            give_up(is_missing, peer, epoch, 1, state_ptr, fault_ptr, PROGRAMS)
        tl.store(at, tl.full([PEERS, COLUMNS], -1, carrier), mask=mask & has_row[:, None])
        rows = dequantize(x, as_float(scale), type, IS_FP8)
        if type == tl.float32:
            # Rows of an empty shard are not sent: all bits are set.
            merged, merged_lse = merge_tree(tl.where(has_row[:, None], rows, 0.0), as_float(lse))
            merged, merged_lse = tl.sum(merged, 0), tl.max(merged_lse, 0)
        else:
            share, merged_lse = shares(as_float(lse))
            # A share of zero gives zero whatever the row holds.
            merged = tl.sum(tl.where(share[:, None] != 0, rows, 0.0) * share[:, None], 0)
        tl.store(merged_ptr + row * WIDTH + column, merged.to(type), mask=column < WIDTH)
        if tile == 0:
            tl.store(merged_lse_ptr + row, merged_lse)
