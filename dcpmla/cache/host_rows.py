"""Host memory for blocks and states that have left the GPU: one row for each item and each pack of layers."""

import math
import mmap
from collections.abc import Iterator, Sequence
from itertools import accumulate
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

from dcpmla.cache.items import Items

PAGE_BYTES = 4096  # rows are multiples, so that files are read and written without a copy
_LANE_BYTES = 8  # widest integers that copies inside the device use
_PACK_BYTES = 1 << 16  # smallest part of an item that is copied alone; PCIe's rate drops with smaller ones


class Pack:
    """The memory of items in successive layers, which is copied together, and the host's memory for it.

    Args:
        items: Memory of the same items in several tensors.
        last_layer: Number of the last of the layers, -1 for memory that belongs to no layer.
    Attributes:
        row_bytes: Bytes of an item, rounded up to whole pages.
        rows: Host's memory [num_slots, row_bytes] uint8; empty before `allocate`.
    """

    def __init__(self, items: Sequence[Items], last_layer: int) -> None:
        self._items, self.last_layer = items, last_layer
        sizes = [each.num_bytes for each in items]
        starts = [0, *accumulate(-(-size // _LANE_BYTES) * _LANE_BYTES for size in sizes)]
        self._columns = [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]
        self.row_bytes = -(-starts[-1] // PAGE_BYTES) * PAGE_BYTES
        self.rows = torch.empty(0, self.row_bytes, dtype=torch.uint8)

    def allocate(self, num_slots: int, is_pinned: bool) -> None:
        """Allocate the host's memory.

        Raises:
            ValueError: The host has too little memory, or does not pin as much.
        """
        self.rows = host_bytes(num_slots * self.row_bytes, is_pinned).view(num_slots, self.row_bytes)

    def read(self, items: Tensor, rows: Tensor) -> None:
        """Copy items [k] of the device into rows [k, row_bytes] of the device."""
        for memory, columns in zip(self._items, self._columns, strict=True):
            memory.read(items, rows[:, columns])

    def write(self, items: Tensor, rows: Tensor) -> None:
        """Copy rows [k, row_bytes] of the device into items [k] of the device."""
        for memory, columns in zip(self._items, self._columns, strict=True):
            memory.write(items, rows[:, columns])


def pack_layers(layers: Sequence[Sequence[Items]]) -> list[Pack]:
    """Return the packs of all layers, in order. Layers with little memory share a pack."""
    packs: list[Pack] = []
    pending: list[Items] = []
    for layer, items in enumerate(layers):
        pending += items
        if sum(each.num_bytes for each in pending) >= _PACK_BYTES:
            packs.append(Pack(pending, layer))
            pending = []
    return [*packs, Pack(pending, len(layers) - 1)] if pending else packs


def runs(slots: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Yield for each run of successive slots its indices in the sequence, and the slots."""
    start = 0
    for end in range(1, len(slots) + 1):
        if end == len(slots) or slots[end] != slots[end - 1] + 1:
            yield slice(start, end), slice(slots[start], slots[end - 1] + 1)
            start = end


def host_bytes(num_bytes: int, is_pinned: bool) -> Tensor:
    """Return memory that begins at a page, pinned if asked to.

    torch's own pinned memory is rounded up to a power of two, up to twice the bytes.

    Raises:
        ValueError: The host does not give or pin as much.
    """
    try:
        memory = np.frombuffer(mmap.mmap(-1, max(num_bytes, PAGE_BYTES)), dtype=np.uint8)
    except OSError as error:
        raise ValueError(_too_large(num_bytes, str(error))) from error
    if is_pinned:
        address, cudart = memory.ctypes.data, torch.cuda.cudart()
        code = int(cudart.cudaHostRegister(address, memory.nbytes, 0))
        if code:
            raise ValueError(_too_large(num_bytes, f"CUDA error {code}"))
        # Memory that is freed while it is registered cannot be registered again.
        finalize(memory, cudart.cudaHostUnregister, address).atexit = False
    return torch.from_numpy(memory)[:num_bytes]


class _Pinned:
    """Pinned memory [N] uint8 under the protocol by which torch makes a tensor of it on the device."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        data = memory.data_ptr(), False
        self.__cuda_array_interface__ = {"shape": tuple(memory.shape), "typestr": "|u1", "data": data, "version": 3}


def host_tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros in host memory, on a GPU pinned: a tensor of the device, whose kernels read and write the memory in
    place.

    Raises:
        ValueError: The host does not give or pin as much.
    """
    memory = host_bytes(math.prod(shape) * dtype.itemsize, device.type == "cuda")
    if device.type == "cuda":
        there = torch.as_tensor(_Pinned(memory), device=device)
        assert there.data_ptr() == memory.data_ptr()  # else it is a copy
        memory = there
    return memory.view(dtype).view(*shape)


def _too_large(num_bytes: int, reason: str) -> str:
    return (
        f"kv_offloading_size (--kv-offloading-size): the host does not give {num_bytes:,} bytes of pinned memory "
        f"({reason}); choose a smaller size"
    )
