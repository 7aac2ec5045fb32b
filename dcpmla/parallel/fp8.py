"""Products with block-quantized fp8 weights, and the rows that they take.

Custom ops (`torch.ops.dcpmla`). The torch code here specifies them and runs on CPUs, on GPUs without e4m3 and in
float64: products with the dequantized weight, exact but for their sums. GPUs of compute capability 8.9 and later
multiply e4m3 by e4m3, so rows are quantized in groups of 128 columns before. No gradients.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dcpmla.operators import operator
from dcpmla.parallel.quantized import BLOCK, BlockFp8, dequantize, quantize_groups

# Rows, and numbers of a result, past which cuBLAS fills an H200 and is faster than the Triton kernel.
SCALED_MM_TOKENS, SCALED_MM_SIZE = 128, 3 << 17
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class QuantizedRows(NamedTuple):
    """T quantized rows of K columns.

    Attributes:
        values: e4m3 [T, K]; nvfp4: uint8 [T, K / 2].
        scales: for a block-quantized weight float32 [T, K / 128], any strides. Attention's output
            (`dcpmla.attention.output.quant`) also comes with other scales: fp8: the one given; fp8_groups: float32
            [T, K / G] in the layout asked for; nvfp4: e4m3 in the order of `formats.empty_nvfp4`.
    """

    values: Tensor
    scales: Tensor

    @classmethod
    def empty_like(cls, x: Tensor) -> "QuantizedRows":
        """Return memory for x [T, K] in groups of 128; each column of scales begins at a multiple of 16 bytes."""
        shape, strides = (x.shape[0], x.shape[1] // BLOCK), (1, (x.shape[0] + 3) // 4 * 4)
        scales = torch.empty_strided(shape, strides, dtype=torch.float32, device=x.device)
        return cls(torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device), scales)


@dataclass(frozen=True)
class NormedRows:
    """Rows that a norm gives to several layers, of which some take them in fp8.

    Attributes:
        plain: [T, K].
        quantized: of the same, in groups of 128.
    """

    plain: Tensor
    quantized: QuantizedRows

    def __getitem__(self, rows: slice) -> "NormedRows":
        return NormedRows(self.plain[rows], QuantizedRows(*(part[rows] for part in self.quantized)))

    @classmethod
    def join(cls, plain: Tensor, values: Tensor, scales: Tensor) -> "PlainRows":
        """Return rows with what they are quantized to; alone where that has no columns (`empty_codes`)."""
        return cls(plain, QuantizedRows(values, scales)) if values.shape[1] else plain


PlainRows = Tensor | NormedRows
AnyRows = PlainRows | QuantizedRows


def plain(x: AnyRows) -> Tensor:
    """Return rows that are not quantized; raise ValueError for others, whose layer has no fp8 weight."""
    if isinstance(x, QuantizedRows):
        raise ValueError("x is quantized, but the weight is not; pass rows in the weight's dtype")
    return x.plain if isinstance(x, NormedRows) else x


def empty_codes(x: Tensor, quantizes: bool) -> QuantizedRows:
    """Return memory for x [T, K] in fp8, or for none of its columns: operators return as many tensors every time."""
    return QuantizedRows.empty_like(x if quantizes else x[:, :0])


def quantize_rows(x: Tensor) -> QuantizedRows:
    """Quantize rows [T, K] as products with block-quantized weights take them."""
    rows = QuantizedRows.empty_like(x)
    if runs_fp8(x.device):
        from dcpmla.parallel.kernels import quantize  # triton is there on Linux only

        quantize.quantize_rows(x, *rows)
    else:
        for part, values in zip(rows, quantize_groups(x, BLOCK), strict=True):
            part.copy_(values)
    return rows


@operator("fp8_linear", mutates_args=("arrivals",))
def fp8_linear(
    x: Tensor,
    x_scales: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor,
    arrivals: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Multiply rows by a block-quantized weight, or G groups of columns each by as many of its rows.

    Args:
        x: [T, G K] bfloat16, float16 or float32; e4m3 where x_scales are given.
        x_scales: float32 [T, G K / 128] of groups of 128 columns, or None.
        weight: e4m3 [N, K], contiguous; K is a multiple of 128, and so is N / G with several groups.
        weight_scale: float32 [ceil(N / 128), K / 128] with contiguous rows.
        arrivals: int32, at least N / 32 zeros, and zeros afterwards: programs count their arrivals in it. One product
            at a time has it.
    Returns:
        [T, N] in dtype, sums in float32.
    Source: DeepSeek-V3's report, section 3.3: tiles of 1 x 128 times blocks of 128 x 128, sums over 128 columns
        promoted to float32.
    """
    if runs_fp8(x.device) and (x_scales is not None or x.dtype in _DTYPES):
        from dcpmla.parallel.kernels import linear

        if x_scales is None:
            x, x_scales = quantize_rows(x)
        is_large = len(x) > SCALED_MM_TOKENS or len(x) * len(weight) >= SCALED_MM_SIZE
        is_plain = x.shape[1] == weight.shape[1] and dtype == torch.bfloat16 and len(weight) % 16 == 0
        if is_large and is_plain and _has_scaled_mm(x.device):
            return _scaled_mm(x, x_scales, weight, weight_scale)
        return linear.fp8_linear(x, x_scales, weight, weight_scale, arrivals, dtype)
    if x_scales is not None:
        x = (x.float().unflatten(-1, (-1, BLOCK)) * x_scales[..., None]).flatten(-2).to(dtype)
    values = dequantize(BlockFp8(weight, weight_scale), x.dtype)
    if x.shape[1] == weight.shape[1]:
        return F.linear(x, values).to(dtype)
    return multiply_groups(x, values.unflatten(0, (x.shape[1] // weight.shape[1], -1))).to(dtype)


@fp8_linear.register_fake
def _(
    x: Tensor,
    x_scales: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor,
    arrivals: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    return torch.empty(x.shape[0], weight.shape[0], dtype=dtype, device=x.device)


def multiply_groups(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply G groups of columns of x [T, G K] each by its weight, of [G, N, K]; returns [T, G N]."""
    out = torch.bmm(x.view(len(x), len(weight), -1).transpose(0, 1), weight.transpose(1, 2))
    return out.transpose(0, 1).flatten(1)


@operator("dequantize_blocks")
def dequantize_blocks(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of a `BlockFp8`: codes [.., N, K], scales [.., ceil(N / 128), ceil(K / 128)]."""
    if runs_fp8(codes.device):
        from dcpmla.parallel.kernels import quantize as kernels

        return kernels.dequantize(codes, scales, dtype)
    return dequantize(BlockFp8(codes, scales), dtype)


@dequantize_blocks.register_fake
def _(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(codes.shape, dtype=dtype, device=codes.device)


@cache
def runs_fp8(device: torch.device) -> bool:
    """Return whether a device converts and multiplies e4m3: GPUs of compute capability 8.9 and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@cache
def _has_scaled_mm(device: torch.device) -> bool:
    """Return whether torch multiplies tiles of 1 x 128 by blocks of 128 x 128: by cuBLAS 12.9 and later on Hopper."""
    version = tuple(map(int, (torch.version.cuda or "0").split(".")))
    return torch.cuda.get_device_capability(device) == (9, 0) and version >= (12, 9)


def _scaled_mm(x: Tensor, x_scales: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """Compute `fp8_linear` in bfloat16 by cuBLAS, which takes whole fours of rows, and scales in columns of them."""
    num_tokens = len(x)
    padding = -num_tokens % 4
    if padding:
        x = F.pad(x.view(torch.uint8), (0, 0, 0, padding)).view(x.dtype)
    if padding or x_scales.stride() != (1, len(x)):
        x_scales = F.pad(x_scales.t(), (0, padding)).contiguous().t()
    blocks = weight_scale.t()
    wanted = -(-len(blocks) // 4) * 4  # columns of a block row's scales
    if blocks.stride(1) != wanted:
        blocks = F.pad(weight_scale, (0, wanted - len(blocks))).t()
    else:
        blocks = blocks.as_strided((wanted, blocks.shape[1]), (1, wanted))
    recipes = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    out = F.scaled_mm(x, weight.t(), x_scales, recipes[0], blocks, recipes[1], output_dtype=torch.bfloat16)
    return out[:num_tokens]
