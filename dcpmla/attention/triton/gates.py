"""Triton kernel of gates of attention's output; `attention/output/gates.py` specifies it."""

import triton
import triton.language as tl
from torch import Tensor

from dcpmla.parallel.kernels.quantize import store_codes
from dcpmla.parallel.quantized import empty_rows

_COLUMNS = tl.constexpr(1024)  # columns of a program


@triton.jit(do_not_specialize=["scales_stride"])
def gates_kernel(
    out_ptr, logits_ptr, gated_ptr, scales_ptr, scales_stride, WIDTH: tl.constexpr, NUM_GATES: tl.constexpr
):
    """Gate some columns of one row a program, in groups of 128 codes where there are scales."""
    row, first_column = tl.program_id(0).to(tl.int64), tl.program_id(1) * _COLUMNS
    column = first_column + tl.arange(0, _COLUMNS)
    mask = column < WIDTH
    out = tl.load(out_ptr + row * WIDTH + column, mask=mask, other=0.0)
    logits = tl.load(logits_ptr + row * NUM_GATES + column // (WIDTH // NUM_GATES), mask=mask, other=0.0)
    gates = tl.sigmoid(logits.to(tl.float32)).to(out.dtype)
    gated = (out.to(tl.float32) * gates.to(tl.float32)).to(out.dtype)
    if scales_ptr is not None:
        store_codes(gated, row, first_column, gated_ptr, scales_ptr, scales_stride, WIDTH)
    else:
        tl.store(gated_ptr + row * WIDTH + column, gated, mask=mask)


def apply_gates(out: Tensor, logits: Tensor, quantizes: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `gates.apply_gates` of contiguous rows in one kernel."""
    num_rows, width = out.shape
    gated, codes, scales = empty_rows(out, quantizes)
    if num_rows:
        grid = num_rows, triton.cdiv(width, _COLUMNS.value)
        written = (codes, scales, scales.stride(1)) if quantizes else (gated, None, 0)
        gates_kernel[grid](
            out.contiguous(), logits.contiguous(), *written, WIDTH=width, NUM_GATES=logits.shape[1], num_warps=4
        )
    return gated, codes, scales
