"""Kernels of the one-sided exchange: each rank stores into its peers' memory, and waits for their stores into its own.

Data is its own flag. A landing, the part of a rank's memory that receives rows, has all bits set (as integers -1, as
rows a NaN that no kernel computes) until a peer's element arrives; the thread that reads an element resets it to -1. So
only rows are sent, 16 bytes a thread, and no fence is needed: each element has arrived or not. A value that many
threads read (an LSE, a scale) is sent in a word of 8 bytes, together with the number of the exchange, its epoch.

Each rank has two landings, which exchanges use in turn. A peer writes into a landing again two exchanges later, after
it has completed the exchange in between. That exchange needed data from this rank, sent after this rank's kernel of the
landing's last exchange had ended. So the landing is free without a signal. Epochs are counted on the device, so that
replays of CUDA graphs and eager calls may follow each other.

A program is one warp, whose threads read the same values and the same clock. (With several warps, one could keep
waiting while another gives up.)

Source: the protocol "Lamport" of TensorRT-LLM's all-reduce (two landings suffice where its sums need three); words as
in NCCL's LL.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from dcpmla.comm.kernels.merge import shares

NUM_PROGRAMS = 2048  # maximum per launch: each program reads the epoch from a counter of its own
_FP8_MAX = tl.constexpr(448.0)  # largest number of e4m3


@triton.jit
def now():
    """Return the time in nanoseconds."""
    return globaltimer()


@triton.jit
def next_epoch(state_ptr):
    """Return the number of this exchange."""
    return tl.load(state_ptr + tl.program_id(0)) + 1


@triton.jit
def count_exchange(epoch, state_ptr, limit, PROGRAMS: tl.constexpr, SHARE: tl.constexpr):
    """Count this exchange, and return its deadline.

    Kernels over landings call this after they have stored their rows, so that the stores need not wait for it. A
    program updates its own counter, and its share of the counters that only larger launches use. After a fault no
    exchange waits.
    """
    tl.debug_barrier()  # all warps must have loaded the epoch before any warp updates it
    counter = tl.program_id(0) + tl.num_programs(0) * tl.arange(0, SHARE)
    tl.store(state_ptr + counter, tl.zeros([SHARE], tl.int32) + epoch, mask=counter < PROGRAMS)
    has_failed = tl.load(state_ptr + PROGRAMS)
    return now() + tl.where(has_failed != 0, 0, tl.cast(limit, tl.int64) * 1000000)


@triton.jit
def give_up(is_missing, peer, epoch, operation, state_ptr, fault_ptr, PROGRAMS: tl.constexpr):
    """Report to the host the first rank [N] whose data is missing. Only the first fault is recorded."""
    first = tl.min(tl.where(is_missing, peer, 255), 0)
    if (tl.atomic_cas(state_ptr + PROGRAMS, 0, 1) == 0) & (tl.load(fault_ptr) == 0):
        tl.store(fault_ptr, (epoch.to(tl.int64) << 32) | (first << 8) | operation)


@triton.jit
def find_landing(epoch, landing_bytes):
    """Return the offsets in bytes of this exchange's rows and of its words in each rank's memory.

    The rows of both landings come first, then the words of both.
    """
    return (epoch & 1) * landing_bytes, 2 * landing_bytes + (epoch & 1) * (landing_bytes // 8)


@triton.jit
def row_in_landing(rank, num_rows, row):
    """Return the index of a rank's row in a landing, where each rank has num_rows rows."""
    return rank * num_rows + row


@triton.jit
def peer_addresses(addresses_ptr, offset, peer, SIZE: tl.constexpr, dtype: tl.constexpr):
    """Return pointers to an offset in the memory of each rank [N]."""
    address = tl.load(addresses_ptr + peer, mask=peer < SIZE, other=0) + offset
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), [16])  # the compiler cannot infer it


@triton.jit
def own_address(addresses_ptr, rank, offset, dtype: tl.constexpr):
    """Return a pointer to an offset in the memory of one rank."""
    return tl.multiple_of((tl.load(addresses_ptr + rank) + offset).to(tl.pointer_type(dtype)), 16)


@triton.jit
def as_word(value, epoch):
    """Pack a float32 and the epoch into a word."""
    value = tl.cast(value, tl.float32).to(tl.int32, bitcast=True)
    return (value.to(tl.int64) & 0xFFFFFFFF) | (epoch.to(tl.int64) << 32)


@triton.jit
def read_words(words, is_peer, nothing, epoch, REPEAT: tl.constexpr):
    """Read words of an exchange [N], as integers: -1 for a word that has not arrived, `nothing` for no peer.

    Every thread loads a word, because with fewer loads than threads the compiler repeats the load at each use, and
    words may arrive in between.
    """
    at = tl.broadcast_to(words[:, None], [words.shape[0], REPEAT])
    word = tl.load(at, mask=is_peer[:, None], other=as_word(nothing, epoch), volatile=True)
    return tl.max(tl.where((word >> 32) == epoch, word & 0xFFFFFFFF, -1), 1)


@triton.jit
def as_float(value):
    """Return the float32 of a word from `read_words`."""
    return value.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def quantize(x, type: tl.constexpr, IS_FP8: tl.constexpr):
    """Return rows [N, M], stored as integers, as they are sent, and the scales [N] that multiply them on arrival.

    Scales are 1 unless rows are sent as e4m3.
    """
    if IS_FP8:
        wide = x.to(type, bitcast=True).to(tl.float32)
        scale = tl.max(tl.abs(wide), 1) / _FP8_MAX
        scale = tl.where(scale > 0, scale, 1.0)
        x = (wide / scale[:, None]).to(tl.float8e4nv).to(tl.int8, bitcast=True)
    else:
        scale = tl.full([x.shape[0]], 1.0, tl.float32)
        x = tl.where(x == -1, -2, x)  # both are NaN; e4m3's NaN differs
    return x, scale


@triton.jit
def dequantize(x, scale, type: tl.constexpr, IS_FP8: tl.constexpr):
    """Return the float32 values of rows from `quantize`."""
    wide = x.to(tl.float8e4nv if IS_FP8 else type, bitcast=True).to(tl.float32)
    return wide * scale[:, None] if IS_FP8 else wide


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
    SHARE: tl.constexpr,
    REPEAT: tl.constexpr,
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
        mine = row_in_landing(rank, num_tokens, token)
        at = peer_rows[:, None] + (mine * WIDTH + column)[None, :]
        tl.store(at, tl.broadcast_to(x, [PEERS, COLUMNS]), mask=is_peer[:, None] & is_column)
        if IS_FP8:
            tl.store(peer_scales + mine * tiles + tile, tl.broadcast_to(as_word(scale, epoch), [PEERS]), mask=is_peer)

    deadline = count_exchange(epoch, state_ptr, limit, PROGRAMS, SHARE)
    for item in range(first, last):
        token, tile = tl.cast(item // tiles, tl.int64), item % tiles
        column = tile * COLUMNS + tl.arange(0, COLUMNS)
        mask = is_peer[:, None] & (column < WIDTH)[None, :]
        theirs = row_in_landing(peer, num_tokens, token)
        at = my_rows + (theirs[:, None] * WIDTH + column[None, :])
        x = tl.full([PEERS, COLUMNS], -1, carrier)
        scale = tl.zeros([PEERS], tl.int64)
        num_missing, is_early = 1, True
        while (num_missing != 0) & is_early:
            if IS_FP8:
                scale = read_words(my_scales + theirs * tiles + tile, is_peer, 1.0, epoch, REPEAT)
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


@triton.jit(do_not_specialize=["num_rows", "rank", "items", "limit"])
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
    SHARE: tl.constexpr,
    REPEAT: tl.constexpr,
):
    """Merge partial rows [T, SIZE h, WIDTH] of each rank -> rows [T, h, WIDTH] of its own heads.

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
        mine = row_in_landing(rank, num_rows, row)
        tl.store(peer_rows[:, None] + (mine * WIDTH + column)[None, :], x, mask=mask)
        if tile == 0:
            tl.store(peer_lses + mine, as_word(lse, epoch), mask=is_peer)
        if IS_FP8:
            tl.store(peer_scales + mine * tiles + tile, as_word(scale, epoch), mask=is_peer)

    deadline = count_exchange(epoch, state_ptr, limit, PROGRAMS, SHARE)
    for item in range(first, last):
        row, tile = tl.cast(item // tiles, tl.int64), item % tiles
        column = tile * COLUMNS + tl.arange(0, COLUMNS)
        mask = is_peer[:, None] & (column < WIDTH)[None, :]
        theirs = row_in_landing(peer, num_rows, row)
        at = my_rows + (theirs[:, None] * WIDTH + column[None, :])
        x = tl.full([PEERS, COLUMNS], -1, carrier)
        lse, scale = tl.zeros([PEERS], tl.int64), tl.zeros([PEERS], tl.int64)
        num_missing, is_early = 1, True
        while (num_missing != 0) & is_early:
            lse = read_words(my_lses + theirs, is_peer, -float("inf"), epoch, REPEAT)
            if IS_FP8:
                scale = read_words(my_scales + theirs * tiles + tile, is_peer, 1.0, epoch, REPEAT)
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
        share, merged_lse = shares(as_float(lse))
        # A share of zero gives zero whatever the row holds.
        rows = tl.where(share[:, None] != 0, dequantize(x, as_float(scale), type, IS_FP8), 0.0)
        merged = tl.sum(rows * share[:, None], 0)
        tl.store(merged_ptr + row * WIDTH + column, merged.to(type), mask=column < WIDTH)
        if tile == 0:
            tl.store(merged_lse_ptr + row, merged_lse)
