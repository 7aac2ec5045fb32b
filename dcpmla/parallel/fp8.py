"""Products with block-quantized fp8 weights, and the quantization of their input rows.

Custom ops (`torch.ops.dcpmla`). The torch code here specifies them and runs on CPUs, on GPUs without e4m3 and in
float64: products with the dequantized weight, exact but for their sums. GPUs of compute capability 8.9 and later
multiply e4m3 by e4m3, so rows are quantized in groups of 128 columns before. No gradients.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from dcpmla.operators import operator
from dcpmla.parallel.fixed import fixed_linear
from dcpmla.parallel.formats import BLOCK, Quantized, dequantize
from dcpmla.parallel.quantized import Fp8Product, QuantizedRows, empty_codes, empty_groups, quantize_groups

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def rows_or_codes(x: Tensor, quantizes: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows x, or with quantizes their codes and scales, in the form of `empty_rows`."""
    return (x.new_empty(len(x), 0), *quantize_rows(x)) if quantizes else (x, *empty_codes(x, False))


@cache
def runs_fp8(device: torch.device) -> bool:
    """Return whether a device converts and multiplies e4m3: GPUs of compute capability 8.9 and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def quantize_rows(x: Tensor) -> QuantizedRows:
    """Quantize rows [T, K] for products with block-quantized weights."""
    return QuantizedRows(*_quantize_rows(x))


@operator(
    "quantize_rows",
    kernel="dcpmla.parallel.kernels.quantize:quantize_rows",
    fake=empty_groups,
    runs=lambda x: runs_fp8(x.device),
)
def _quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    rows = empty_groups(x)
    for part, values in zip(rows, quantize_groups(x, BLOCK), strict=True):
        part.copy_(values)
    return rows


@operator(
    "fp8_linear",
    kernel="dcpmla.parallel.kernels.linear:fp8_linear",
    fake=lambda call: call.x.new_empty(call.x.shape[0], call.weight.shape[0], dtype=call.dtype),
    runs=lambda call: runs_fp8(call.x.device) and (call.x_scales is not None or call.x.dtype in _DTYPES),
    mutates_args=("arrivals",),
)
def fp8_linear(call: Fp8Product) -> Tensor:
    """Multiply rows by a block-quantized weight.

    Returns:
        [T, N] in dtype, sums in float32.
    Source: DeepSeek-V3's report, section 3.3: tiles of 1 x 128 times blocks of 128 x 128, sums over 128 columns
        promoted to float32.
    """
    x, x_scales, weight, weight_scale, _, dtype, is_deterministic = call
    if x_scales is not None:
        x = (x.float().unflatten(-1, (-1, BLOCK)) * x_scales[..., None]).flatten(-2).to(dtype)
    values = dequantize(Quantized(weight, weight_scale), x.dtype)
    if is_deterministic:
        return fixed_linear(x, values, dtype)
    if x.shape[1] == weight.shape[1]:
        return F.linear(x, values).to(dtype)
    return multiply_groups(x, values.unflatten(0, (x.shape[1] // weight.shape[1], -1))).to(dtype)


@operator("multiply_groups", fake=lambda x, weight: x.new_empty(x.shape[0], weight.shape[0] * weight.shape[1]))
def multiply_groups(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply each of G groups of columns of x [T, G K] by its weight in [G, N, K]; return [T, G N]. A custom op."""
    out = x.new_empty(len(x), *weight.shape[:2])
    # A product writes into any result with stride 1 along its rows, so no transposition is copied.
    torch.bmm(x.view(len(x), len(weight), -1).transpose(0, 1), weight.transpose(1, 2), out=out.transpose(0, 1))
    return out.flatten(1)


@operator(
    "dequantize_blocks",
    kernel="dcpmla.parallel.kernels.quantize:dequantize",
    fake=lambda codes, _, dtype: codes.new_empty(codes.shape, dtype=dtype),
    runs=lambda codes, *_: runs_fp8(codes.device),
)
def dequantize_blocks(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of fp8 in blocks: codes [.., N, K], scales [.., ceil(N / 128), ceil(K / 128)]."""
    return dequantize(Quantized(codes, scales), dtype)
