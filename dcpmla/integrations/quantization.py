"""Tensors on disk: plain ones, and matrices in 8 or 4 bits with their scales, sliced before they are read."""

from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from dcpmla.parallel.formats import BLOCK, GROUP, AnyWeight, Quantized, dequantize, from_e8m0
from dcpmla.parallel.linear import QuantizedWeight

# Names of dtypes as safetensors has them.
FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_E4M3 = "F8_E4M3"
_TWO_CODES = ("I8", "U8")  # e2m1 in the halves of a byte
_EIGHT_CODES = "I32"  # integers in 4 bits, the first in the lowest ones
_EXPONENTS = ("F8_E8M0", "U8")  # scales 2^(byte - 127)


class StoredTensor:
    """A tensor of a safetensors file; indexing maps the slice alone into memory.

    Args:
        file: Open file (safetensors' handle has no public type).
        name: Name of the tensor in the file.
    """

    def __init__(self, file: Any, name: str) -> None:
        self._slice = file.get_slice(name)

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._slice.get_shape())

    @property
    def dtype(self) -> str:
        """safetensors' name of it."""
        name: str = self._slice.get_dtype()
        return name

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        part: Tensor = self._slice[index]
        return part


def quantized_matrix(name: str, codes: StoredTensor, scales: StoredTensor, block: tuple[int, int]) -> QuantizedWeight:
    """Return a matrix [N, K] of codes and scales, without reading them.

    Args:
        name: Name in messages.
        codes: e4m3 [N, K], bytes [N, K / 2] with two e2m1 codes each, or int32 [N, K / 8] with eight integers each.
        scales: float32, bfloat16 or float16 [ceil(N / rows), ceil(K / columns)], or, of e4m3, bytes that are exponents
            (e8m0), also [N, K / 32] whatever the block; of e2m1 exponents alone, [N, K / 32]. A single one may have any
            shape.
        block: Rows and columns of e4m3 codes or of integers that share a scale.
    Raises:
        ValueError: Codes or scales have another shape or dtype.
    """
    if codes.dtype == _E4M3 and scales.dtype in (*FLOATS, *_EXPONENTS):
        if scales.dtype in _EXPONENTS and list(scales.shape) == [codes.shape[0], codes.shape[-1] / GROUP]:
            block = (1, GROUP)
        return _Fp8Matrix(name, codes, scales, codes.shape, block)
    if codes.dtype in _TWO_CODES and scales.dtype in _EXPONENTS and 2 * codes.shape[-1:].numel() % GROUP == 0:
        return _Fp4Matrix(name, codes, scales, _wider(codes.shape, 2), (1, GROUP))
    if codes.dtype == _EIGHT_CODES and scales.dtype in FLOATS:
        return _Int4Matrix(name, codes, scales, _wider(codes.shape, 8), block)
    raise ValueError(
        f"checkpoint: tensor {name} of dtype {codes.dtype} and shape {tuple(codes.shape)} has scales of dtype "
        f"{scales.dtype}; codes may be {_E4M3} with scales of {', '.join((*FLOATS, *_EXPONENTS))}, two of e2m1 a byte "
        f"({', '.join(_TWO_CODES)}) in whole groups of {GROUP} with scales of {', '.join(_EXPONENTS)}, or eight "
        f"integers in {_EIGHT_CODES} with scales of {', '.join(FLOATS)}"
    )


def check_has_values(name: str, tensor: StoredTensor) -> None:
    """Raise ValueError for codes, which have no values without scales."""
    is_packed = tensor.dtype in _TWO_CODES or (tensor.dtype == _EIGHT_CODES and name.endswith(".weight"))
    if tensor.dtype == _E4M3 or is_packed:
        raise ValueError(
            f"checkpoint: tensor {name} has dtype {tensor.dtype}, but there are no scales in {name}_scale_inv or "
            f"{name}_scale"
        )


def _wider(shape: torch.Size, num_codes: int) -> torch.Size:
    """Return the shape of a matrix whose elements hold several codes each."""
    return torch.Size([*shape[:1], *(num_codes * size for size in shape[1:])])


class _QuantizedMatrix:
    """Codes on disk and the scales of their blocks, which are read once."""

    def __init__(
        self, name: str, codes: StoredTensor, scales: StoredTensor, shape: torch.Size, block: tuple[int, int]
    ) -> None:
        self._name, self._codes, self._stored_scales, self.shape, self._block = name, codes, scales, shape, block
        self._num_blocks = [-(-size // side) for size, side in zip(shape, block, strict=False)]
        is_one = prod(self._num_blocks) == 1 == scales.shape.numel()
        if len(shape) != 2 or not (is_one or list(scales.shape) == self._num_blocks):
            blocks = " x ".join(str(min(pair)) for pair in zip(shape, block, strict=False))
            raise ValueError(
                f"checkpoint: tensor {name} of shape {tuple(shape)} has scales of shape {tuple(scales.shape)}; "
                f"blocks of {blocks} ask for {tuple(self._num_blocks)}"
            )

    @cached_property
    def _scales(self) -> Tensor:
        """All scales, float32, or the bytes of exponents."""
        return self._checked(self._stored_scales[()].reshape(self._num_blocks))

    def _checked(self, scales: Tensor) -> Tensor:
        scales = scales.view(torch.uint8) if scales.itemsize == 1 else scales.float()
        values = from_e8m0(scales) if scales.dtype == torch.uint8 else scales
        if not (values.isfinite() & (values >= 0)).all():
            raise ValueError(f"checkpoint: tensor {self._name} has a scale that is negative, infinite or NaN")
        return scales


class _Fp8Matrix(_QuantizedMatrix):
    """A matrix in e4m3; indexing gives float32."""

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        index = _both(index)
        at = [torch.arange(size)[part] // side for size, part, side in zip(self.shape, index, self._block, strict=True)]
        return self._codes[index].to(torch.float32).mul_(self._scales_at(*at))

    def stored(self, rows: slice, cols: slice) -> AnyWeight:
        """Return a slice as `BlockFp8` if it begins and ends where blocks of 128 x 128 do, and these have one scale
        each; as `GroupFp8` of whole groups, if e8m0 scales are for 32 columns; else its values.
        """
        if self._block[1] == GROUP and self._stored_scales.dtype in _EXPONENTS:
            return self._groups(rows, cols)
        at = []
        for part, size, side in zip((rows, cols), self.shape, self._block, strict=True):
            first, end, _ = part.indices(size)
            if first % BLOCK or (end % BLOCK and end < size) or (side % BLOCK and side < size):
                return self[rows, cols]
            at.append(torch.arange(first, end, BLOCK) // side)
        return Quantized(self._codes[rows, cols], self._scales_at(*at))

    def _groups(self, rows: slice, cols: slice) -> AnyWeight:
        first, end, _ = cols.indices(self.shape[1])
        if first % GROUP or end % GROUP:
            return self[rows, cols]
        groups = slice(first // GROUP, end // GROUP)
        if self._block[0] == 1:  # a table has more scales than should be read at once
            scales = self._checked(self._stored_scales[rows, groups])
        else:
            scales = self._scales[torch.arange(self.shape[0])[rows] // self._block[0], groups]
        return Quantized(self._codes[rows, cols], scales)

    def _scales_at(self, rows: Tensor, cols: Tensor) -> Tensor:
        scales = self._scales[rows][:, cols]
        return from_e8m0(scales) if scales.dtype == torch.uint8 else scales


class _Fp4Matrix(_QuantizedMatrix):
    """A matrix in e2m1; indexing gives float32."""

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        rows, cols = _both(index)
        return dequantize(self._groups(rows, slice(None)), torch.float32)[:, cols]

    def stored(self, rows: slice, cols: slice) -> AnyWeight:
        """Return a slice as `GroupFp4` if its columns are whole groups; else its values."""
        first, end, _ = cols.indices(self.shape[1])
        return self[rows, cols] if first % GROUP or end % GROUP else self._groups(rows, slice(first, end))

    def _groups(self, rows: slice, cols: slice) -> Quantized:
        first, end, _ = cols.indices(self.shape[1])
        codes = self._codes[rows, first // 2 : end // 2].view(torch.uint8)
        return Quantized(codes, self._scales[rows, first // GROUP : end // GROUP])


class _Int4Matrix(_QuantizedMatrix):
    """A matrix of integers in 4 bits; indexing gives float32."""

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        rows, cols = _both(index)
        first, end, _ = cols.indices(self.shape[1])
        columns, whole = torch.arange(first, end), slice(first - first % 8, -(-end // 8) * 8)
        codes = self._bytes(rows, whole)[:, (columns - whole.start) // 2]
        return (((codes >> (columns % 2 * 4)) & 15) - 8.0) * self._scales[rows][:, columns // self._block[1]]

    def stored(self, rows: slice, cols: slice) -> AnyWeight:
        """Return a slice as `GroupInt4` if its columns are whole groups of 32, with one bfloat16 scale each; else its
        values.
        """
        first, end, _ = cols.indices(self.shape[1])
        has_groups = not (first % GROUP or end % GROUP or self._block[1] % GROUP)
        if not has_groups or FLOATS[self._stored_scales.dtype] != torch.bfloat16:
            return self[rows, cols]
        groups = torch.arange(first, end, GROUP) // self._block[1]
        return Quantized(self._bytes(rows, slice(first, end)), self._scales[rows][:, groups].bfloat16())

    def _bytes(self, rows: slice, cols: slice) -> Tensor:
        return self._codes[rows, cols.start // 8 : cols.stop // 8].view(torch.uint8)


def _both(index: slice | tuple[slice, ...]) -> tuple[slice, slice]:
    """Return the slices of rows and of columns; an omitted one is the full slice."""
    rows, cols = (*(index if isinstance(index, tuple) else (index,)), slice(None), slice(None))[:2]
    return rows, cols
