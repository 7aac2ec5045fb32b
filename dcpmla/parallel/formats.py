"""Weights in 8 and 4 bits: a description of each format, one class for all, and their values.

Products with them are in `parallel/fp8.py` and `parallel/packed.py`.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 128  # rows and columns that share a scale in block-quantized fp8
GROUP = 32  # columns that share a scale in MXFP8 and MXFP4
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # indexed by the lower three bits of a code; the fourth is the sign
_ZERO = 8  # the code of 0 among integers without zero points


class Format(NamedTuple):
    """How a rank holds the numbers of a matrix [.., N, K].

    Attributes:
        codes: "fp8" and "mxfp8" for e4m3, "fp4" and "nvfp4" for e2m1, "int4" for integers from 0 to 15.
        scales: Dtype of scales; uint8 are exponents (e8m0).
        rows, columns: Numbers of rows and of columns that share a scale.
        has_zeros: Whether each group has a zero point; without, an integer's is 8.
        has_factors: Whether each row has a factor beside its scales.
    """

    codes: str
    scales: torch.dtype
    rows: int = 1
    columns: int = GROUP
    has_zeros: bool = False
    has_factors: bool = False

    @property
    def is_packed(self) -> bool:
        """True of 4 bits, two codes in a byte."""
        return self.codes in ("fp4", "nvfp4", "int4")

    def cut_at(self, *columns: int) -> "Format | None":
        """Return the format of a slice that begins and ends at these columns: in groups of 128, 64 or 32 of integers.
        None if it is not packed or has no whole groups.
        """
        if not self.is_packed or any(column % GROUP for column in columns):
            return None
        if self.codes != "int4":
            return self
        sizes = (size for size in (BLOCK, 64, GROUP) if not any(side % size for side in (self.columns, *columns)))
        size = next(sizes, None)
        if size is None:
            return None
        scales = INT4.scales if size < BLOCK and self.scales == W4AFP8.scales else self.scales
        return self._replace(columns=size, scales=scales)

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of a matrix [.., N, K], scales included."""
        num_rows = prod(shape[:-1])
        num_scales = prod(shape[:-2]) * -(-shape[-2] // self.rows) * (shape[-1] // self.columns)
        scale_bytes = self.scales.itemsize + self.has_zeros
        return prod(shape) // (1 + self.is_packed) + num_scales * scale_bytes + 4 * num_rows * self.has_factors


FP8 = Format("fp8", torch.float32, BLOCK, BLOCK)  # as DeepSeek-V3 ships it
MXFP8 = Format("mxfp8", torch.uint8)  # DeepSeek-V4.1's blocks of 32 x 32 repeat the scale for their rows
FP4 = Format("fp4", torch.uint8)  # MXFP4: experts of DeepSeek-V4
NVFP4 = Format("nvfp4", torch.float8_e4m3fn, columns=16, has_factors=True)
INT4 = Format("int4", torch.bfloat16)  # in groups of 32, 64 or 128; scales may be float16
# Integers of experts that multiply many rows in e4m3: the scales multiply sums, as those of FP8 do.
W4AFP8 = INT4._replace(scales=torch.float32, columns=BLOCK)
FORMATS = {format_.codes: format_ for format_ in (FP8, MXFP8, FP4, NVFP4, INT4)}


class Quantized(NamedTuple):
    """A matrix [.., N, K] in one of FORMATS, which follows from the dtypes. A value is its code, less the group's zero
    point, times its group's scale and its row's factor.

    Attributes:
        codes: Codes, e4m3 [.., N, K], or uint8 [.., N, K / 2], two in a byte, the even column in the lower half.
        scales: Scales [.., ceil(N / rows), ceil(K / columns)].
        zeros: Zero points, uint8 [.., N, K / columns] from 0 to 15; None for none, and for integers with 8.
        factors: Factors, float32 [.., N]; None for 1.
    Source: e2m1's order from the conversion published with DeepSeek-V4 (inference/convert.py), and that of integers
        from the format pack-quantized of compressed-tensors, whose eight codes of an int32 begin with the lowest bits.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    factors: Tensor | None = None

    @property
    def format(self) -> Format:
        if self.codes.dtype == torch.float8_e4m3fn:
            return MXFP8 if self.scales.dtype == torch.uint8 else FP8
        if self.scales.dtype in (FP4.scales, NVFP4.scales):
            return FP4 if self.scales.dtype == FP4.scales else NVFP4
        columns = 2 * self.codes.shape[-1] // max(1, self.scales.shape[-1])
        return INT4._replace(scales=self.scales.dtype, columns=columns, has_zeros=self.zeros is not None)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Quantized":
        """Return a matrix of each tensor's image."""
        return Quantized(*(None if part is None else function(part) for part in self))  # type: ignore[arg-type]


AnyWeight = Tensor | Quantized


def format_of(weight: AnyWeight) -> Format | None:
    """Return a weight's format, None for one that is not quantized."""
    return None if isinstance(weight, Tensor) else weight.format


def format_name(weight: AnyWeight) -> str:
    """Return the codes of a weight's format, "plain" for one that is not quantized."""
    return "plain" if isinstance(weight, Tensor) else weight.format.codes


def is_block_fp8(weight: AnyWeight) -> bool:
    """Return whether a weight has codes in e4m3, and a scale per block of 128 x 128."""
    return format_name(weight) == "fp8"


def is_packed(weight: AnyWeight) -> bool:
    """Return whether a weight has codes in 4 bits."""
    return isinstance(weight, Quantized) and weight.format.is_packed


def can_stack(parts: Sequence[AnyWeight], num_columns: int) -> bool:
    """Return whether a linear layer can hold parts [.., K], one above the other, as they are stored."""
    first = format_of(parts[0])
    if first is None or any(format_of(part) != first for part in parts):
        return False
    on_grid = all(len(part.codes) % BLOCK == 0 for part in parts[:-1] if isinstance(part, Quantized))
    return (on_grid or first != FP8) and num_columns % (GROUP if first.is_packed else BLOCK) == 0


def dequantize(weight: AnyWeight, dtype: torch.dtype) -> Tensor:
    """Return the values [.., N, K] of a weight, products in float32, rounded once."""
    if isinstance(weight, Tensor):
        return weight.to(dtype)
    codes, scales, zeros, factors = weight
    if is_block_fp8(weight):
        return (codes.float() * spread(scales, BLOCK, BLOCK, codes)).to(dtype)
    values = torch.stack([codes & 15, codes >> 4], -1).flatten(-2) if is_packed(weight) else codes
    if weight.format.codes in ("fp4", "nvfp4"):
        sizes = torch.tensor([*_E2M1, *(-size for size in _E2M1)], device=codes.device)
        values = sizes[values.int()]
    groups = values.float().unflatten(-1, (scales.shape[-1], -1))
    if weight.format.codes == "int4":
        groups = groups - (_ZERO if zeros is None else zeros.float()[..., None])
    sizes = from_e8m0(scales) if scales.dtype == torch.uint8 else scales.float()
    if factors is not None:
        sizes = sizes * factors[..., None]
    return (groups * sizes[..., None]).flatten(-2).to(dtype)


def from_e8m0(exponents: Tensor) -> Tensor:
    """Return the float32 values of e8m0 bytes, uint8: 2^(byte - 127), NaN for 255."""
    return exponents.view(torch.float8_e8m0fnu).float()


def cut(size: int, rank: int, num_ranks: int, in_blocks: bool = False) -> slice:
    """Return a rank's part of a dim, cut as evenly as possible.

    Args:
        in_blocks: Whether to cut between blocks of quantized weights, if every rank gets at least one.
    """
    unit = BLOCK if in_blocks and size % BLOCK == 0 and size // BLOCK >= num_ranks else 1
    return slice(size // unit * rank // num_ranks * unit, size // unit * (rank + 1) // num_ranks * unit)


def spread(scales: Tensor, num_rows: int, num_cols: int, target: Tensor) -> Tensor:
    """Repeat each scale over its rows and columns, cut to the shape of another matrix."""
    rows = scales.repeat_interleave(num_rows, -2)[..., : target.shape[-2], :]
    return rows.repeat_interleave(num_cols, -1)[..., : target.shape[-1]]
