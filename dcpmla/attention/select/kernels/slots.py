"""The slots of the selected tokens that a rank owns, in a program's registers."""

import triton
import triton.language as tl


@triton.jit
def store_slots(
    slots_ptr,
    position,
    table_ptr,
    num_blocks,
    BLOCK_SIZE: tl.constexpr,
    DCP_RANK: tl.constexpr,
    DCP_SIZE: tl.constexpr,
    INTERLEAVE: tl.constexpr,
):
    """Store the slots of a row's positions [N] that this rank owns, contiguously, and return their number.

    table_ptr points to the num_blocks ids of the request; nothing beyond them is read. Positions of -1 are none.
    """
    is_mine = (position >= 0) & (position // INTERLEAVE % DCP_SIZE == DCP_RANK)
    at = position // (DCP_SIZE * INTERLEAVE) * INTERLEAVE + position % INTERLEAVE
    block = tl.load(table_ptr + tl.minimum(at // BLOCK_SIZE, num_blocks - 1), mask=is_mine)
    mine = is_mine.to(tl.int32)
    tl.store(slots_ptr + tl.cumsum(mine, 0) - mine, block * BLOCK_SIZE + at % BLOCK_SIZE, mask=is_mine)
    return tl.sum(mine, 0)
