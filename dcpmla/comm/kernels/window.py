"""The kernel that stores rows at their final position in each peer's memory, so that many rows need no further copy.

Unlike the kernels of `landings`, it signals the arrival of rows with flags: program p of a rank sets flags of programs
p of its peers, and waits for theirs.
"""

import triton
import triton.language as tl

from dcpmla.comm.kernels.landings import count_exchange, give_up, next_epoch, now, own_address, peer_addresses


@triton.jit
def _meet(
    phase,
    exchange,
    OPERATION: tl.constexpr,
    SIZE: tl.constexpr,
    PEERS: tl.constexpr,
    THREADS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Signal to this program's peers that it has reached a phase, with all its stores done, and wait for them.

    exchange: epoch and deadline; rank, flags_at, addresses_ptr, state_ptr and fault_ptr of `place_kernel`.
    """
    epoch, deadline, rank, flags_at, addresses_ptr, state_ptr, fault_ptr = exchange
    peer = tl.arange(0, PEERS)
    is_peer = peer < SIZE
    program = (phase * SIZE) * PROGRAMS + tl.program_id(0)
    flags = peer_addresses(addresses_ptr, flags_at, peer, SIZE, tl.int32)
    tl.debug_barrier()
    tl.atomic_xchg(flags + (program + rank * PROGRAMS), epoch, mask=is_peer, sem="release", scope="sys")
    mine = own_address(addresses_ptr, rank, flags_at, tl.int32) + (program + peer * PROGRAMS)
    by_all_threads = tl.broadcast_to(mine[:, None], [PEERS, THREADS // PEERS])  # see `landings.read_words`
    seen = tl.zeros([PEERS, THREADS // PEERS], tl.int32)
    waits = 2
    while waits == 2:
        seen = tl.load(by_all_threads, mask=is_peer[:, None], other=epoch, volatile=True)
        # 2 means wait, 1 give up. The maximum is the same in all warps, although their clocks differ.
        waits = tl.max(tl.where(seen != epoch, tl.where(now() < deadline, 2, 1), 0), None)
    if waits != 0:
        give_up(tl.max((seen != epoch).to(tl.int32), 1) != 0, peer, epoch, OPERATION, state_ptr, fault_ptr, PROGRAMS)
    tl.atomic_add(mine, 0, mask=is_peer, sem="acquire", scope="sys")
    tl.debug_barrier()


@triton.jit(do_not_specialize=["num_rows", "rank", "limit"])
def place_kernel(
    rows_ptr,
    targets_ptr,
    addresses_ptr,
    state_ptr,
    fault_ptr,
    num_rows,
    rank,
    window_at,
    flags_at,
    limit,
    OPERATION: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    PEERS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    THREADS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Store row n of rows [N, WIDTH] as row targets[n] of a window in each rank's memory.

    A row whose target is -1 is not stored. Without targets, row n becomes row n SIZE + rank.
    """
    epoch = next_epoch(state_ptr)
    deadline = count_exchange(epoch, state_ptr, limit, PROGRAMS)
    exchange = (epoch, deadline, rank, flags_at, addresses_ptr, state_ptr, fault_ptr)
    # A rank may read its window until it reaches this point.
    _meet(0, exchange, OPERATION, SIZE, PEERS, THREADS, PROGRAMS)
    carrier: tl.constexpr = rows_ptr.dtype.element_ty
    tiles: tl.constexpr = WIDTH // COLUMNS  # COLUMNS divides WIDTH
    for item in range(tl.program_id(0), tl.cdiv(num_rows, ROWS) * tiles, tl.num_programs(0)):
        row = (item // tiles) * ROWS + tl.arange(0, ROWS).to(tl.int64)
        column = (item % tiles) * COLUMNS + tl.arange(0, COLUMNS)
        is_row = row < num_rows
        target = row * SIZE + rank
        if targets_ptr is not None:
            target = tl.load(targets_ptr + row, mask=is_row, other=-1)
        mask = (is_row & (target >= 0))[:, None]
        x = tl.load(rows_ptr + (row[:, None] * WIDTH + column[None, :]), mask=mask)
        at = target[:, None] * WIDTH + column[None, :]
        for step in tl.static_range(SIZE):  # each rank starts with a different peer
            tl.store(own_address(addresses_ptr, (rank + step) % SIZE, window_at, carrier) + at, x, mask=mask)
    _meet(1, exchange, OPERATION, SIZE, PEERS, THREADS, PROGRAMS)
