"""Rows in 8 bits, quantized in groups, for products with weights in 8 bits (`parallel/formats.py`)."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dcpmla.parallel.formats import BLOCK, AnyWeight, Quantized

_FP8_MAX = 448.0
SMALLEST_AMAX = 1e-10  # lower bound on a group's largest magnitude, since its scale divides


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
    """A product of rows and a weight in block fp8; with G groups of columns, of each and N / G of the weight's rows.

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


PlainRows = Tensor | NormedRows
AnyRows = PlainRows | QuantizedRows


def plain(x: AnyRows) -> Tensor:
    """Return rows that are not quantized; raise ValueError for `QuantizedRows`, which only fp8 weights take."""
    if isinstance(x, QuantizedRows):
        raise ValueError("x is quantized, but the weight is not; pass rows in the weight's dtype")
    return x.plain if isinstance(x, NormedRows) else x


def pack(codes: Tensor, scales: Tensor | None, *others: Tensor | None) -> AnyWeight:
    """Return a weight of the fields of `Quantized`; the codes alone if there are no scales."""
    return codes if scales is None else Quantized(codes, scales, *others)


def fields(weight: AnyWeight) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return what `pack` takes."""
    return (weight, None, None, None) if isinstance(weight, Tensor) else weight


def unpack(weight: AnyWeight) -> tuple[Tensor, Tensor | None]:
    """Return a weight as arguments of custom ops: itself and None, or codes and scales."""
    return (weight, None) if isinstance(weight, Tensor) else (weight.codes, weight.scales)


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
