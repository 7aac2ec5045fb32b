"""Triton kernels between numbers and e4m3 with scales: rows to groups of 128, weights back from blocks of 128 x 128.

A group's bytes equal the result of `parallel.quantized.quantize_groups`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dcpmla.parallel.formats import BLOCK
from dcpmla.parallel.quantized import SMALLEST_AMAX, empty_groups

_FP8_MAX = tl.constexpr(448.0)
_SMALLEST_AMAX = tl.constexpr(SMALLEST_AMAX)
_BLOCK = tl.constexpr(BLOCK)
_ROWS = 8  # rows per program of quantize_kernel
_GROUPS = 4


@triton.jit
def to_fp8(x):
    """Convert float32 to e4m3, saturated; NaN stays NaN."""
    return tl.clamp(x, -_FP8_MAX, _FP8_MAX, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.jit
def divide(x, s):
    """Divide x by s with correct rounding, without the instructions that the ends of float32's range would need."""
    inverse = tl.div_rn(1.0, s)
    quotient = x * inverse
    return tl.fma(tl.fma(-quotient, s, x), inverse, quotient)


@triton.jit
def group_scale(amax):
    """Return the scale of a group whose largest magnitude is amax."""
    return tl.div_rn(tl.maximum(amax, _SMALLEST_AMAX), _FP8_MAX)


@triton.jit
def to_codes(x):
    """Quantize float32 groups [N, 128]: return e4m3 codes [N, 128] and scales [N]."""
    s = group_scale(tl.max(tl.abs(x), 1))
    return to_fp8(divide(x, s[:, None])), s


@triton.jit
def store_codes(x, row, first_column, codes_ptr, scales_ptr, scales_stride, WIDTH: tl.constexpr):
    """Quantize whole groups of a row [COLUMNS], and store them in rows [T, WIDTH] and columns of scales, from
    first_column on.
    """
    GROUPS: tl.constexpr = x.shape[0] // _BLOCK
    codes, s = to_codes(x.to(tl.float32).reshape(GROUPS, _BLOCK))
    group = first_column // _BLOCK + tl.arange(0, GROUPS)
    column = group[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    tl.store(codes_ptr + row * WIDTH + column, codes, mask=column < WIDTH)
    tl.store(scales_ptr + row + group * scales_stride, s, mask=group * _BLOCK < WIDTH)


@triton.jit(do_not_specialize=["num_rows", "scales_stride_group"])
def quantize_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    num_rows,
    width,
    x_stride,
    scales_stride_row,
    scales_stride_group,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Quantize a tile of rows and groups."""
    COLUMNS: tl.constexpr = GROUPS * _BLOCK
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)[None, :]
    is_row = row < num_rows
    x = tl.load(x_ptr + row * x_stride + column, mask=is_row & (column < width), other=0.0)
    codes, s = to_codes(x.to(tl.float32).reshape(ROWS * GROUPS, _BLOCK))
    tl.store(codes_ptr + row * width + column, codes.reshape(ROWS, COLUMNS), mask=is_row & (column < width))
    at = row * scales_stride_row + group * scales_stride_group
    tl.store(scales_ptr + at, s.reshape(ROWS, GROUPS), mask=is_row & (group * _BLOCK < width))


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `fp8.quantize_rows` in one kernel."""
    codes, scales = empty_groups(x)
    quantize_into(x, codes, scales)
    return codes, scales


def quantize_into(x: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Quantize x [T, K] into codes [T, K] and scales [T, K / 128] of any strides."""
    num_rows, width = x.shape
    if num_rows:
        x = x if x.stride(1) == 1 else x.contiguous()
        grid = triton.cdiv(num_rows, _ROWS), triton.cdiv(width, _GROUPS * BLOCK)
        sizes = num_rows, width, x.stride(0), *scales.stride()
        quantize_kernel[grid](x, codes, scales, *sizes, ROWS=_ROWS, GROUPS=_GROUPS)


@triton.jit
def dequantize_kernel(
    codes_ptr,
    scales_ptr,
    out_ptr,
    num_rows,
    num_columns,
    codes_stride_matrix,
    codes_stride_row,
    scales_stride_matrix,
    scales_stride_row,
    ROWS: tl.constexpr,
):
    """Dequantize a tile of rows of one block."""
    matrix = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    is_inside = (row < num_rows) & (column < num_columns)
    codes = tl.load(codes_ptr + matrix * codes_stride_matrix + row.to(tl.int64) * codes_stride_row + column, is_inside)
    block = row // _BLOCK * scales_stride_row + tl.program_id(1)
    s = tl.load(scales_ptr + matrix * scales_stride_matrix + block, mask=row < num_rows, other=0.0)
    x = (codes.to(tl.float32) * s).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (matrix * num_rows + row) * num_columns + column, x, mask=is_inside)


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute `quantized.dequantize` of codes [.., N, K] and scales in one kernel."""
    num_rows, num_columns = codes.shape[-2:]
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    matrices, blocks = (part.view(-1, *part.shape[-2:]) if part.ndim == 2 else part for part in (codes, scales))
    rows = 32
    dequantize_kernel[(triton.cdiv(num_rows, rows), triton.cdiv(num_columns, BLOCK), len(matrices))](
        matrices, blocks, out, num_rows, num_columns, *matrices.stride()[:2], *blocks.stride()[:2], ROWS=rows
    )
    return out
