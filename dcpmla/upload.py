"""Asynchronous copies of arrays from the host to a device, many in one transfer."""

from collections.abc import Sequence
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
    starts, end = [], 0
    for array in arrays:
        starts.append(end)
        end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    staged = torch.empty(end, dtype=torch.uint8, pin_memory=True)
    buffer = staged.numpy()
    for start, array in zip(starts, arrays, strict=True):
        buffer[start : start + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
    on_device = staged.to(device, non_blocking=True)
    return [
        on_device[start : start + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]


@lru_cache(maxsize=64)
def upload_once(rows: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """Copy to a device rows of numbers that many steps use, like the layout of drafts; return [len(rows), n] int64.
    Equal rows are copied once, so callers must not write to the result.
    """
    return upload([np.array(rows, dtype=np.int64)], device)[0]
