"""Properties of the GPU and of tensors on it that kernel launchers ask for."""

import torch
from torch import Tensor
from triton.compiler.compiler import max_shared_mem
from triton.tools.tensor_descriptor import TensorDescriptor

_HOPPER_SHARED_MEMORY = 232_448


def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may use; without a GPU (Triton's interpreter), Hopper's."""
    return int(max_shared_mem(device.index)) if device.type == "cuda" else _HOPPER_SHARED_MEMORY


def describe(rows: Tensor, tile: list[int]) -> TensorDescriptor:
    """Describe rows [..., S, D] for loads by TMA, in tiles of the given shape.

    TMA needs the data, and every dim but the last, to begin at multiples of 16 bytes: other tensors are copied.
    """
    starts = (rows.data_ptr(), *(stride * rows.element_size() for stride in rows.stride()[:-1]))
    if rows.stride(-1) != 1 or any(start % 16 for start in starts):
        multiple = 16 // rows.element_size()
        width = -(-rows.shape[-1] // multiple) * multiple
        rows = rows.new_empty(*rows.shape[:-1], width)[..., : rows.shape[-1]].copy_(rows)
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), tile)
