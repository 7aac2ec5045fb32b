"""Tensors cut from one piece of memory, for engines that allocate caches themselves."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 256  # bytes between the starts of tensors, as CUDA's allocator gives them

Described = tuple[tuple[int, ...], torch.dtype]


def carved_bytes(tensors: Sequence[Described]) -> int:
    """Return the bytes that `carve` needs for tensors of the given shapes and dtypes."""
    return sum(_aligned_bytes(*tensor) for tensor in tensors)


def carve(memory: Tensor, tensors: Sequence[Described]) -> list[Tensor]:
    """Cut tensors of the given shapes and dtypes from memory, one after the other.

    Args:
        memory: Bytes [N], contiguous, of any dtype of one byte.
    Raises:
        ValueError: The memory is too small.
    """
    needed = carved_bytes(tensors)
    if memory.numel() < needed:
        raise ValueError(f"memory has {memory.numel():,} bytes; the tensors need {needed:,}")
    flat, start, parts = memory.view(torch.uint8), 0, []
    for shape, dtype in tensors:
        num_bytes = math.prod(shape) * dtype.itemsize
        parts.append(flat[start : start + num_bytes].view(dtype).view(shape))
        start += _aligned_bytes(shape, dtype)
    return parts


def _aligned_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
