"""What a GPU gives a program."""

import torch
from triton.compiler.compiler import max_shared_mem

_HOPPER = 232_448


def shared_memory(device: torch.device) -> int:
    """Bytes that a program may use; where Triton interprets, without a GPU, those on a Hopper GPU."""
    return int(max_shared_mem(device.index)) if device.type == "cuda" else _HOPPER
