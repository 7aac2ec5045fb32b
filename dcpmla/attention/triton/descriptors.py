"""Tensors as kernels read them through TMA."""

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


def describe(rows: Tensor, tile: list[int]) -> TensorDescriptor:
    """Of rows [..., S, D]; TMA wants them, and all other dims, to begin at multiples of 16 bytes: they are copied if
    they do not.
    """
    starts = (rows.data_ptr(), *(stride * rows.element_size() for stride in rows.stride()[:-1]))
    if rows.stride(-1) != 1 or any(start % 16 for start in starts):
        multiple = 16 // rows.element_size()
        width = -(-rows.shape[-1] // multiple) * multiple
        rows = rows.new_empty(*rows.shape[:-1], width)[..., : rows.shape[-1]].copy_(rows)
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), tile)
