"""The activation of MLPs as one Triton kernel; `dcpmla.model.mlp.swiglu` is its reference."""

import triton
import triton.language as tl
from torch import Tensor

from dcpmla.model.kernels.grouped import swiglu as activate
from dcpmla.parallel.fp8 import empty_codes
from dcpmla.parallel.kernels.quantize import store_codes

_COLUMNS = tl.constexpr(1024)  # columns of a program


@triton.jit(do_not_specialize=["scales_stride"])
def swiglu_kernel(gate_up_ptr, out_ptr, scales_ptr, scales_stride, limit, WIDTH: tl.constexpr):
    """Compute some columns of one row a program, in groups of 128 codes where there are scales."""
    row, first_column = tl.program_id(0).to(tl.int64), tl.program_id(1) * _COLUMNS
    column = first_column + tl.arange(0, _COLUMNS)
    mask = column < WIDTH
    at = gate_up_ptr + row * 2 * WIDTH + column
    gate = tl.load(at, mask=mask, other=0.0)
    up = tl.load(at + WIDTH, mask=mask, other=0.0)
    out = activate(gate.to(tl.float32), up.to(tl.float32), limit).to(gate.dtype)
    if scales_ptr is not None:
        store_codes(out, row, first_column, out_ptr, scales_ptr, scales_stride, WIDTH)
    else:
        tl.store(out_ptr + row * WIDTH + column, out, mask=mask)


def swiglu(gate_up: Tensor, limit: float | None, quantizes: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `model.mlp.swiglu` of contiguous rows in one kernel."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, 0 if quantizes else width)
    codes, scales = empty_codes(gate_up[:, :width], quantizes)
    if num_rows:
        grid = num_rows, triton.cdiv(width, _COLUMNS.value)
        written = (codes, scales, scales.stride(1)) if quantizes else (out, None, 0)
        swiglu_kernel[grid](gate_up, *written, limit, WIDTH=width)
    return out, codes, scales
