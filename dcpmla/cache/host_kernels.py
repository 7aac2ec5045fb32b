"""Triton kernel that copies rows of pinned host memory into a GPU's memory, over PCIe."""

import triton
import triton.language as tl
from torch import Tensor

# Eight programs keep enough bytes in flight to reach 93 % of a plain copy's rate on an H200, and leave most
# multiprocessors to the steps that run meanwhile.
_PROGRAMS = 8
_TILE = 4096  # elements
_NUM_WARPS = 8


def load_rows(host: Tensor, host_starts: Tensor, memory: Tensor, starts: Tensor, width: int) -> None:
    """Copy rows of host memory into memory of a GPU, on its current stream.

    The GPU reads host memory itself: a copy through its copy engines takes a launch for each run of slots, and delays
    the small copies of steps by as much as it takes.

    Args:
        host: Pinned host memory, any shape, in the dtype of `memory`.
        host_starts, starts: First element of each row in both memories [k] int64, on the GPU.
        memory: Memory of the GPU, any strides.
        width: Elements of a row.
    """
    sizes = len(starts), width
    _load_rows[(_PROGRAMS,)](host, host_starts, memory, starts, *sizes, TILE=_TILE, num_warps=_NUM_WARPS)


@triton.jit(do_not_specialize=["num_rows", "width"])
def _load_rows(host, host_starts, memory, starts, num_rows, width, TILE: tl.constexpr):
    """Copy every eighth tile."""
    tiles_per_row = tl.cdiv(width, TILE)
    for tile in range(tl.program_id(0), num_rows * tiles_per_row, tl.num_programs(0)):
        row = tile // tiles_per_row
        columns = (tile % tiles_per_row) * TILE + tl.arange(0, TILE)
        content = tl.load(host + tl.load(host_starts + row) + columns, columns < width)
        tl.store(memory + tl.load(starts + row) + columns, content, columns < width)
