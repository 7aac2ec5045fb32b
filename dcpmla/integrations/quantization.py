"""Tensors on disk: plain ones, and matrices in 8 or 4 bits with their scales, sliced before they are read."""

from collections.abc import Mapping
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dcpmla.parallel.formats import BLOCK, FP4, GROUP, INT4, NVFP4, AnyWeight, Format, Quantized, dequantize, from_e8m0
from dcpmla.parallel.linear import QuantizedWeight

# Names of dtypes as safetensors has them.
FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_E4M3 = "F8_E4M3"
_EXPONENTS = ("F8_E8M0", "U8")  # scales 2^(byte - 127)
_LOW = 0x0F0F0F0F  # the lower half of each byte of a word
_NIBBLES = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # of AWQ's words, for outputs 0 to 7


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


class Layout(NamedTuple):
    """How checkpoints store a matrix [N, K] in 4 bits.

    Attributes:
        name: Name in messages.
        held: Format of its slices in memory.
        codes, scales: Dtypes on disk. A byte holds two codes, an I32 eight, the first in the lowest bits.
        is_transposed: Whether codes, scales and zero points are stored [K, N].
        packs_rows: Whether an element has eight rows of a column, in AWQ's order; else columns of a row, in order.
        is_signed: Whether integers are two's complement; else they are at least 0, and have a zero point.
    """

    name: str
    held: Format
    codes: tuple[str, ...]
    scales: tuple[str, ...]
    is_transposed: bool = False
    packs_rows: bool = False
    is_signed: bool = False

    def shape_of(self, codes: StoredTensor) -> torch.Size:
        """Return [N, K]."""
        count = 8 if codes.dtype == "I32" else 2
        rows, cols = codes.shape[::-1] if self.is_transposed else codes.shape
        return torch.Size((rows * count, cols) if self.packs_rows else (rows, cols * count))

    def fits(self, codes: StoredTensor, scales: StoredTensor) -> bool:
        """Return whether these are codes and scales of this layout, which dtypes and shapes show."""
        if codes.dtype not in self.codes or scales.dtype not in self.scales or len(codes.shape) != 2:
            return False
        (num_rows, num_cols), found = self.shape_of(codes), scales.shape[::-1] if self.is_transposed else scales.shape
        if len(found) != 2 or found[0] != num_rows or found[1] == 0 or num_cols % found[1]:
            return False
        size = num_cols // found[1]
        return size % 8 == 0 if self.held.codes == "int4" else size == self.held.columns


LAYOUTS = (
    Layout("pack-quantized of compressed-tensors", INT4, ("I32",), tuple(FLOATS)),
    Layout("AWQ", INT4, ("I32",), tuple(FLOATS), is_transposed=True, packs_rows=True),
    Layout("GPTQ", INT4, ("I32",), tuple(FLOATS), is_transposed=True),
    Layout("w4afp8", INT4, ("I8",), tuple(FLOATS), is_signed=True),
    Layout("NVFP4", NVFP4, ("U8",), (_E4M3,)),
    Layout("MXFP4", FP4, ("I8", "U8"), _EXPONENTS),
)
_PACKED = {dtype for layout in LAYOUTS for dtype in layout.codes}


def quantized_matrix(
    name: str, parts: Mapping[str, StoredTensor], blocks: tuple[tuple[int, int], ...] = ((BLOCK, BLOCK),)
) -> QuantizedWeight:
    """Return a matrix [N, K] of codes and scales, without reading them.

    Args:
        name: Name in messages.
        parts: Its tensors: "codes" and "scales", and where the format has them "zeros", a "factor" of all scales, or a
            "divisor". Codes are e4m3 [N, K], or in 4 bits as in one of LAYOUTS, and so are scales. Scales of e4m3 are
            float32, bfloat16 or float16 [ceil(N / rows), ceil(K / columns)], or exponents (e8m0), also [N, K / 32]
            whatever the block. A single one may have any shape.
        blocks: Rows and columns of e4m3 codes that may share a scale.
    Raises:
        ValueError: Codes or scales have another shape or dtype.
    """
    codes, scales = parts["codes"], parts["scales"]
    if codes.dtype == _E4M3 and scales.dtype in (*FLOATS, *_EXPONENTS):
        if scales.dtype in _EXPONENTS and list(scales.shape) == [codes.shape[0], codes.shape[-1] / GROUP]:
            blocks = ((1, GROUP),)
        fitting = (block for block in blocks if list(scales.shape) == _num_blocks(codes.shape, block))
        return _Fp8Matrix(name, codes, scales, next(fitting, blocks[0]))
    for layout in LAYOUTS:
        if layout.fits(codes, scales):
            return _PackedMatrix(name, parts, layout)
    known = (f"{', '.join(each.codes)} with scales of {', '.join(each.scales)} ({each.name})" for each in LAYOUTS)
    raise ValueError(
        f"checkpoint: tensor {name} of dtype {codes.dtype} and shape {tuple(codes.shape)} has scales of dtype "
        f"{scales.dtype} and shape {tuple(scales.shape)}; codes may be {_E4M3} with scales of "
        f"{', '.join((*FLOATS, *_EXPONENTS))}, or in whole groups {'; '.join(known)}"
    )


def check_has_values(name: str, tensor: StoredTensor) -> None:
    """Raise ValueError for codes, which have no values without scales."""
    is_packed = tensor.dtype in _PACKED and (tensor.dtype != "I32" or name.endswith(".weight"))
    if tensor.dtype == _E4M3 or is_packed:
        raise ValueError(
            f"checkpoint: tensor {name} has dtype {tensor.dtype}, but there are no scales in {name}_scale_inv or "
            f"{name}_scale"
        )


def _num_blocks(shape: torch.Size, block: tuple[int, int]) -> list[int]:
    return [-(-size // side) for size, side in zip(shape, block, strict=False)]


def _checked(name: str, scales: Tensor, is_signed: bool = False) -> Tensor:
    """Return scales, exponents as bytes.

    Raises:
        ValueError: One is not finite, or is negative where the codes have the sign.
    """
    scales = scales.view(torch.uint8) if scales.dtype == torch.float8_e8m0fnu else scales
    values = from_e8m0(scales) if scales.dtype == torch.uint8 else scales.float()
    if not (values.isfinite() & (is_signed | (values >= 0))).all():
        raise ValueError(f"checkpoint: tensor {name} has a scale that is negative, infinite or NaN")
    return scales


class _Fp8Matrix:
    """A matrix in e4m3 and the scales of its blocks, which are read once; indexing gives float32."""

    def __init__(self, name: str, codes: StoredTensor, scales: StoredTensor, block: tuple[int, int]) -> None:
        self._name, self._codes, self._stored_scales, self.shape, self._block = name, codes, scales, codes.shape, block
        self._num_blocks = _num_blocks(self.shape, block)
        is_one = prod(self._num_blocks) == 1 == scales.shape.numel()
        if len(self.shape) != 2 or not (is_one or list(scales.shape) == self._num_blocks):
            sides = " x ".join(str(min(pair)) for pair in zip(self.shape, block, strict=False))
            raise ValueError(
                f"checkpoint: tensor {name} of shape {tuple(self.shape)} has scales of shape {tuple(scales.shape)}; "
                f"blocks of {sides} ask for {tuple(self._num_blocks)}"
            )

    @cached_property
    def _scales(self) -> Tensor:
        """All scales, float32, or the bytes of exponents."""
        scales = _checked(self._name, self._stored_scales[()].reshape(self._num_blocks))
        return scales if scales.dtype == torch.uint8 else scales.float()

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        index = _both(index)
        at = [torch.arange(size)[part] // side for size, part, side in zip(self.shape, index, self._block, strict=True)]
        return self._codes[index].to(torch.float32).mul_(self._scales_at(*at))

    def stored(self, rows: slice, cols: slice) -> AnyWeight:
        """Return a slice as block fp8 if it begins and ends where blocks of 128 x 128 do, and these have one scale
        each; in whole groups, if e8m0 scales are for 32 columns; else its values.
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
            scales = _checked(self._name, self._stored_scales[rows, groups])
        else:
            scales = self._scales[torch.arange(self.shape[0])[rows] // self._block[0], groups]
        return Quantized(self._codes[rows, cols], scales)

    def _scales_at(self, rows: Tensor, cols: Tensor) -> Tensor:
        scales = self._scales[rows][:, cols]
        return from_e8m0(scales) if scales.dtype == torch.uint8 else scales


class _PackedMatrix:
    """A matrix in 4 bits; indexing gives float32."""

    def __init__(self, name: str, parts: Mapping[str, StoredTensor], layout: Layout) -> None:
        self._name, self._parts, self._layout = name, parts, layout
        self.shape = layout.shape_of(parts["codes"])
        scales = parts["scales"]
        self._columns = self.shape[1] // scales.shape[0 if layout.is_transposed else 1]
        # SGLang computes w4afp8 with scales in bfloat16, whatever their dtype. Others of float32 are not rounded.
        self._scales = torch.bfloat16 if layout.is_signed else FLOATS.get(scales.dtype, layout.held.scales)

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        rows, cols = _both(index)
        first, end, _ = cols.indices(self.shape[1])
        start = first // self._columns * self._columns
        whole = self._read(rows, start, -(-end // self._columns) * self._columns, self._columns)
        return dequantize(whole, torch.float32)[:, first - start : end - start]

    def stored(self, rows: slice, cols: slice) -> AnyWeight:
        """Return a slice of whole groups, which may be smaller than the checkpoint's; else its values."""
        first, end, _ = cols.indices(self.shape[1])
        held = self._layout.held._replace(columns=self._columns).cut_at(first, end)
        if held is None or self._scales == torch.float32:
            return self[rows, cols]
        return self._read(rows, first, end, held.columns)

    def _read(self, rows: slice, first: int, end: int, columns: int) -> Quantized:
        """Return a slice with a scale for each of so many columns."""
        start, stop, _ = rows.indices(self.shape[0])
        groups = slice(first // self._columns, -(-end // self._columns))
        at = torch.arange(first, end, columns) // self._columns - groups.start
        is_int4 = self._layout.held.codes == "int4"
        scales = _checked(self._name, self._slice("scales", slice(start, stop), groups), is_int4)
        scales = scales.to(self._scales)[:, at] if is_int4 else scales
        zeros, factors = self._zeros(start, stop, groups), None
        if self._layout.held.has_factors:
            parts = self._parts
            factor = 1 / parts["divisor"][()] if "divisor" in parts else parts["factor"][()]
            factors = factor.float().reshape(1).expand(stop - start)
        return Quantized(self._codes(start, stop, first, end), scales, None if zeros is None else zeros[:, at], factors)

    def _codes(self, start: int, stop: int, first: int, end: int) -> Tensor:
        """Return bytes [n, k / 2] of codes, the even column in the lower half."""
        if self._layout.packs_rows:
            return self._pairs_of_columns(start, stop, slice(first, end))
        count = 8 if self._parts["codes"].dtype == "I32" else 2
        packed = self._slice("codes", slice(start, stop), slice(first // count, end // count)).contiguous()
        return packed.view(torch.uint8) ^ (0x88 if self._layout.is_signed else 0)

    def _zeros(self, start: int, stop: int, groups: slice) -> Tensor | None:
        """Return the zero points [n, groups] of codes from 0 to 15; None for 8, as in all of GPTQ's that are read."""
        is_symmetric = self._layout.is_transposed and not self._layout.packs_rows
        return None if "zeros" not in self._parts or is_symmetric else self._packed_rows("zeros", start, stop, groups)

    def _pairs_of_columns(self, start: int, stop: int, cols: slice) -> Tensor:
        """Return bytes [n, k / 2] of AWQ's codes, four of a word at a time."""
        words = self._parts["codes"][cols, start // 8 : -(-stop // 8)]
        even, odd = words[::2], words[1::2]
        low, high = even & _LOW | (odd & _LOW) << 4, even >> 4 & _LOW | odd & ~_LOW
        # Outputs 0, 4, 1, 5 and 2, 6, 3, 7 of each word's eight.
        pairs = torch.stack([low, high], -1).view(torch.uint8).unflatten(-1, (4, 2))
        return pairs.permute(1, 3, 2, 0).reshape(-1, len(even))[start % 8 : start % 8 + stop - start]

    def _packed_rows(self, part: str, start: int, stop: int, cols: slice) -> Tensor:
        """Return numbers [n, columns] of a tensor whose words hold eight rows each."""
        words = self._slice(part, slice(start // 8, -(-stop // 8)), cols).T.contiguous().view(torch.uint8)
        numbers = torch.stack([words & 15, words >> 4], -1).flatten(-2)
        if self._layout.packs_rows:
            numbers = numbers.unflatten(-1, (-1, 8))[..., _NIBBLES].flatten(-2)
        return numbers[:, start % 8 : start % 8 + stop - start].T.contiguous()

    def _slice(self, part: str, rows: slice, cols: slice) -> Tensor:
        return self._parts[part][cols, rows].T if self._layout.is_transposed else self._parts[part][rows, cols]


def _both(index: slice | tuple[slice, ...]) -> tuple[slice, slice]:
    """Return the slices of rows and of columns; an omitted one is the full slice."""
    rows, cols = (*(index if isinstance(index, tuple) else (index,)), slice(None), slice(None))[:2]
    return rows, cols
