"""Numbers in 8 and 4 bits: weights in the formats of checkpoints, their values, and rows quantized in groups.

Products with them are in `parallel/fp8.py` and `parallel/group_fp8.py`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 128  # rows and columns that share a scale in block-quantized fp8
GROUP = 32  # columns that share a scale in 4 bits, and in MXFP8
_FP8_MAX = 448.0
SMALLEST_AMAX = 1e-10  # lower bound on a group's largest magnitude, since its scale divides
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # indexed by the lower three bits of a code; the fourth is the sign


class BlockFp8(NamedTuple):
    """A matrix [.., N, K] in e4m3 with a scale per block of 128 x 128, as DeepSeek-V3 ships it.

    Attributes:
        codes: Codes, e4m3 [.., N, K].
        scales: Scales, float32 [.., ceil(N / 128), ceil(K / 128)]; a value is its code times its block's scale.
    """

    codes: Tensor
    scales: Tensor


class GroupFp8(NamedTuple):
    """A matrix [.., N, K] in e4m3 with a scale per 32 columns of a row (MXFP8). A matrix with a scale per block of
    32 x 32, as DeepSeek-V4.1 ships it, repeats the scale for the block's rows.

    Attributes:
        codes: Codes, e4m3 [.., N, K].
        scales: Scales, uint8 [.., N, K / 32], e8m0: a value is its code's times 2^(scale - 127).
    """

    codes: Tensor
    scales: Tensor


class GroupFp4(NamedTuple):
    """A matrix [.., N, K] in e2m1 with a scale per 32 columns of a row, as DeepSeek-V4 ships its experts.

    Attributes:
        codes: Codes, uint8 [.., N, K / 2], two in a byte, the even column in the lower half.
        scales: Scales, uint8 [.., N, K / 32], e8m0: a value is its code's times 2^(scale - 127).
    Source: the conversion published with DeepSeek-V4 (inference/convert.py), which takes the lower half first.
    """

    codes: Tensor
    scales: Tensor


class GroupInt4(NamedTuple):
    """A matrix [.., N, K] of integers in 4 bits with a scale per 32 columns of a row, as Kimi-K2-Thinking and its
    successors ship their experts.

    Attributes:
        codes: Codes, uint8 [.., N, K / 2], two in a byte, the even column in the lower half; a code is an integer + 8.
        scales: Scales, bfloat16 [.., N, K / 32]; a value is its integer times its group's scale.
    Source: the format pack-quantized of compressed-tensors, whose eight codes of an int32 begin with the lowest bits.
    """

    codes: Tensor
    scales: Tensor


class QuantizedRows(NamedTuple):
    """T quantized rows of K columns.

    Attributes:
        values: Codes, e4m3 [T, K]; nvfp4: uint8 [T, K / 2].
        scales: Scales for a block-quantized weight, float32 [T, K / 128] of any strides, or [1] for all rows.
            Attention's output (`dcpmla.attention.output.rows`) also comes with other scales: fp8_groups: float32
            [T, K / G] in the layout asked for; nvfp4: e4m3 in the order of `formats.new_rows`.
    """

    values: Tensor
    scales: Tensor


@dataclass(frozen=True)
class NormedRows:
    """Output rows of a norm for several layers; some layers take them in fp8.

    Attributes:
        plain: Rows [T, K], not quantized.
        quantized: Quantized rows, in groups of 128.
    """

    plain: Tensor
    quantized: QuantizedRows

    def __getitem__(self, rows: slice) -> "NormedRows":
        return NormedRows(self.plain[rows], QuantizedRows(*(part[rows] for part in self.quantized)))

    @classmethod
    def join(cls, plain: Tensor, values: Tensor, scales: Tensor) -> "PlainRows":
        """Return rows with their quantized values, or the rows alone if those have no columns (`empty_codes`)."""
        return cls(plain, QuantizedRows(values, scales)) if values.shape[1] else plain


class Fp8Product(NamedTuple):
    """A product of rows and a `BlockFp8`; with G groups of columns, of each group and N / G of the weight's rows.

    Attributes:
        x: Rows [T, G K], bfloat16, float16 or float32; e4m3 if x_scales are given.
        x_scales: Scales of groups of 128 columns, float32 [T, G K / 128], or None.
        weight: Codes, e4m3 [N, K], contiguous; K is a multiple of 128, and so is N / G with several groups.
        weight_scale: Scales, float32 [ceil(N / 128), K / 128] with contiguous rows.
        arrivals: Counters of programs' arrivals, int32, at least N / 32 zeros, and zeros afterwards. Only one product
            at a time may use it.
        dtype: Dtype of the result.
        is_deterministic: Whether a row's bits depend on no other row (`parallel.fixed`); only without groups.
    """

    x: Tensor
    x_scales: Tensor | None
    weight: Tensor
    weight_scale: Tensor
    arrivals: Tensor
    dtype: torch.dtype
    is_deterministic: bool = False


AnyWeight = Tensor | BlockFp8 | GroupFp8 | GroupFp4 | GroupInt4
PlainRows = Tensor | NormedRows
AnyRows = PlainRows | QuantizedRows


def plain(x: AnyRows) -> Tensor:
    """Return rows that are not quantized; raise ValueError for `QuantizedRows`, which only fp8 weights take."""
    if isinstance(x, QuantizedRows):
        raise ValueError("x is quantized, but the weight is not; pass rows in the weight's dtype")
    return x.plain if isinstance(x, NormedRows) else x


def unpack(weight: AnyWeight) -> tuple[Tensor, Tensor | None]:
    """Return a weight as arguments of custom ops: itself and None, or codes and scales."""
    return (weight, None) if isinstance(weight, Tensor) else (weight.codes, weight.scales)


def dequantize(weight: AnyWeight, dtype: torch.dtype) -> Tensor:
    """Return the values [.., N, K] of a weight, products in float32, rounded once."""
    if isinstance(weight, Tensor):
        return weight.to(dtype)
    if isinstance(weight, GroupFp8):
        return _scale_groups(weight.codes.float(), from_e8m0(weight.scales), dtype)
    if isinstance(weight, GroupFp4):
        codes = _unpack_codes(weight.codes)
        sizes = torch.tensor(_E2M1, device=codes.device)[codes & 7]
        return _scale_groups(torch.where(codes >= 8, -sizes, sizes), from_e8m0(weight.scales), dtype)
    if isinstance(weight, GroupInt4):
        return _scale_groups((_unpack_codes(weight.codes) - 8).float(), weight.scales.float(), dtype)
    return (weight.codes.float() * spread(weight.scales, BLOCK, BLOCK, weight.codes)).to(dtype)


def _unpack_codes(codes: Tensor) -> Tensor:
    """Return codes of 4 bits [.., K / 2] one by one, int32 [.., K]."""
    return torch.stack([codes & 15, codes >> 4], -1).flatten(-2).int()


def _scale_groups(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return (values.unflatten(-1, (-1, GROUP)) * scales[..., None]).flatten(-2).to(dtype)


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


def quantize_groups(x: Tensor, group_size: int, ue8m0: bool = False) -> tuple[Tensor, Tensor]:
    """Quantize rows x [T, N] to e4m3 [T, N], saturated, with float32 scales [T, N / G].

    Args:
        group_size: Number G of columns that share a scale, their largest magnitude / 448.
        ue8m0: Whether scales are raised to the next power of two.
    Source: the quantization of activations in DeepSeek-V3 (its report, section 3.3), with the scales' bound of vLLM's
        kernels.
    """
    groups = x.float().unflatten(1, (-1, group_size))
    s = groups.abs().amax(-1).clamp(min=SMALLEST_AMAX) / _FP8_MAX
    if ue8m0:
        mantissa, exponent = torch.frexp(s)  # mantissa in [0.5, 1): log2 would round
        s = torch.ldexp(torch.ones_like(s), exponent - (mantissa == 0.5).int())
    return (groups / s[..., None]).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn).flatten(1), s


def empty_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return memory for x [T, K] in e4m3 and its scales in groups of 128, each column at a multiple of 16 bytes."""
    shape, strides = (x.shape[0], x.shape[1] // BLOCK), (1, (x.shape[0] + 3) // 4 * 4)
    scales = torch.empty_strided(shape, strides, dtype=torch.float32, device=x.device)
    return torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device), scales


def empty_codes(x: Tensor, quantizes: bool) -> QuantizedRows:
    """Return memory for x [T, K] in fp8, or for 0 columns: an op must always return the same number of tensors."""
    return QuantizedRows(*empty_groups(x if quantizes else x[:, :0]))


def empty_rows(x: Tensor, quantizes: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return memory for x [T, K] as rows, codes and scales: for the first alone, or with quantizes for the others."""
    return x.new_empty(x.shape[0], 0 if quantizes else x.shape[1]), *empty_codes(x, quantizes)


def spread(scales: Tensor, num_rows: int, num_cols: int, target: Tensor) -> Tensor:
    """Repeat each scale over its rows and columns, cut to the shape of another matrix."""
    rows = scales.repeat_interleave(num_rows, -2)[..., : target.shape[-2], :]
    return rows.repeat_interleave(num_cols, -1)[..., : target.shape[-1]]
