"""Asynchronous copies of arrays from the host to a device, many in one transfer."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes; the widest loads of kernels need arrays aligned to this


def upload(arrays: Sequence[np.ndarray[Any, Any]], device: torch.device | str) -> list[Tensor]:
    """Copy arrays to a device. To a GPU they go through one pinned buffer, and the host does not wait for the copy.

    Args:
        arrays: Arrays of integers or floats, any shapes; on the CPU the tensors share their memory.
    Returns:
        Tensors of the same shapes and dtypes, which may be parts of one buffer.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    parts = aligned_slices((array.nbytes for array in arrays), _ALIGNMENT)
    staged = torch.empty(parts[-1].stop if parts else 0, dtype=torch.uint8, pin_memory=True)
    buffer = staged.numpy()
    for part, array in zip(parts, arrays, strict=True):
        buffer[part].view(array.dtype).reshape(array.shape)[...] = array
    on_device = staged.to(device, non_blocking=True)
    return [
        on_device[part].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for part, array in zip(parts, arrays, strict=True)
    ]


def aligned_slices(lengths: Iterable[int], alignment: int) -> list[slice]:
    """Return consecutive slices of the given lengths, each of which begins at a multiple of alignment."""
    slices, begin = [], 0
    for length in lengths:
        slices.append(slice(begin, begin + length))
        begin += -(-length // alignment) * alignment
    return slices


@lru_cache(maxsize=64)
def upload_once(rows: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """Copy to a device rows of numbers that many steps use, like the layout of drafts; return [len(rows), n] int64.
    Equal rows are copied once, so callers must not write to the result.
    """
    return upload([np.array(rows, dtype=np.int64)], device)[0]
