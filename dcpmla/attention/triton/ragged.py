"""The search for a program's request in a ragged batch."""

import triton
import triton.language as tl


@triton.jit
def find_tile(start_loc_ptr, num_reqs, program, ROWS: tl.constexpr):
    """Find a program's request, and the request's tile of ROWS rows that the program computes.

    Request r has the programs from start[r] // ROWS + r on, one per tile and at most one more, so no table and no host
    sync is needed. Tiles of one row have a program each, from start[r] on.
    """
    low = 0
    high = num_reqs
    while low < high - 1:
        middle = (low + high) // 2
        first = tl.load(start_loc_ptr + middle)
        if ROWS > 1:
            first = first // ROWS + middle
        if first <= program:
            low = middle
        else:
            high = middle
    first = tl.load(start_loc_ptr + low)
    if ROWS > 1:
        first = first // ROWS + low
    return low, program - first
