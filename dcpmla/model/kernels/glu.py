"""Triton functions and kernel of gated linear units; `dcpmla.model.mlp.activate_rows` is the reference."""

import triton
import triton.language as tl
from torch import Tensor

from dcpmla.model.glu import Glu
from dcpmla.parallel.kernels.quantize import store_codes
from dcpmla.parallel.quantized import empty_rows

_COLUMNS = tl.constexpr(1024)  # columns of a program


@triton.jit
def _bend(x, bound):
    """Return bound * tanh(x / bound)."""
    x = x / bound
    square = x * x
    # 1 - 2 / (exp(2 x) + 1) loses digits near 0, where the series' next term is below 4e-7 of the value.
    small = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    return bound * tl.where(square < 0.0625, small, 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))


@triton.jit
def activate(gate, up, gate_bound, up_bound, IS_SMOOTH: tl.constexpr):
    """Return the gated linear unit of float32 values; arguments as the attributes of `model.glu.Glu`."""
    gated = gate
    if IS_SMOOTH:
        if gate_bound is not None:
            gated = _bend(gate, gate_bound)
        if up_bound is not None:
            up = _bend(up, up_bound)
    else:
        if gate_bound is not None:
            gate = tl.minimum(gate, gate_bound, propagate_nan=tl.PropagateNan.ALL)
            gated = gate
        if up_bound is not None:
            up = tl.clamp(up, -up_bound, up_bound, propagate_nan=tl.PropagateNan.ALL)
    return gated / (1.0 + tl.exp(-gate)) * up


@triton.jit(do_not_specialize=["scales_stride"])
def glu_kernel(
    gate_up_ptr,
    out_ptr,
    scales_ptr,
    scales_stride,
    gate_bound,
    up_bound,
    IS_SMOOTH: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Compute some columns of one row a program, in groups of 128 codes where there are scales."""
    row, first_column = tl.program_id(0).to(tl.int64), tl.program_id(1) * _COLUMNS
    column = first_column + tl.arange(0, _COLUMNS)
    mask = column < WIDTH
    at = gate_up_ptr + row * 2 * WIDTH + column
    gate = tl.load(at, mask=mask, other=0.0)
    up = tl.load(at + WIDTH, mask=mask, other=0.0)
    out = activate(gate.to(tl.float32), up.to(tl.float32), gate_bound, up_bound, IS_SMOOTH).to(gate.dtype)
    if scales_ptr is not None:
        store_codes(out, row, first_column, out_ptr, scales_ptr, scales_stride, WIDTH)
    else:
        tl.store(out_ptr + row * WIDTH + column, out, mask=mask)


def activate_rows(gate_up: Tensor, glu: Glu, quantizes: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `model.mlp.activate_rows` of contiguous rows in one kernel."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out, codes, scales = empty_rows(gate_up[:, :width], quantizes)
    if num_rows:
        grid = num_rows, triton.cdiv(width, _COLUMNS.value)
        written = (codes, scales, scales.stride(1)) if quantizes else (out, None, 0)
        glu_kernel[grid](gate_up, *written, *glu[:2], IS_SMOOTH=glu.is_smooth, WIDTH=width)
    return out, codes, scales
