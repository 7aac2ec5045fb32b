"""Triton kernel of RMSNorm, alone and after rows were added to the residual; `comm.norm` specifies it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dcpmla.comm.calls import NormedSum
from dcpmla.comm.kernels.terms import load_sum
from dcpmla.comm.terms import Terms
from dcpmla.parallel.kernels.quantize import store_codes
from dcpmla.parallel.quantized import empty_codes


@triton.jit
def normalize(x, squares, weight, eps, WIDTH: tl.constexpr):
    """Return the norm of items by the sum of squares of their row, rounded as in `comm.norm.rms_norm`."""
    normed = (x.to(tl.float32) * tl.rsqrt(squares / WIDTH + eps)).to(x.dtype)
    return (normed.to(tl.float32) * weight.to(tl.float32)).to(x.dtype)


@triton.jit(do_not_specialize=["scales_stride", "num_ids"])
def add_norm_kernel(
    rows_ptr,
    ids_ptr,
    num_ids,
    residual_ptr,
    weight_ptr,
    normed_ptr,
    codes_ptr,
    scales_ptr,
    scales_stride,
    sums_ptr,
    eps,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    TERMS: tl.constexpr,
):
    """Add rows and residual [T, WIDTH], round each sum once, and norm it: one program a row. A row is the sum of TERMS
    rows unless TERMS is 0. Without rows_ptr the residual is normed alone.
    """
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS)
    rows = row + tl.zeros([1], tl.int64)
    at, mask = row * WIDTH + column, column < WIDTH
    sums = tl.load(residual_ptr + at, mask=mask, other=0.0)
    if rows_ptr is not None:
        type: tl.constexpr = rows_ptr.dtype.element_ty
        total = load_sum(rows_ptr, ids_ptr, num_ids, rows, at, mask, type, WIDTH, TERMS).to(type).to(tl.float32)
        sums = (total + sums.to(tl.float32)).to(sums_ptr.dtype.element_ty)
        tl.store(sums_ptr + at, sums, mask=mask)
    wide = sums.to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0)
    normed = normalize(sums, tl.sum(wide * wide, 0), weight, eps, WIDTH)
    tl.store(normed_ptr + at, normed, mask=mask)
    if codes_ptr is not None:
        store_codes(normed, row, 0, codes_ptr, scales_ptr, scales_stride, WIDTH)


def add_norm(call: NormedSum) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `comm.norm.add_norm` in one kernel."""
    sums = torch.empty(call.residual.shape, dtype=call.residual.dtype, device=call.residual.device)
    normed, codes, scales = _norm(call, call.rows.rows.contiguous(), sums)
    return normed, sums, codes, scales


def norm_rows(x: Tensor, weight: Tensor, eps: float, quantizes: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `comm.norm.norm_rows` in one kernel."""
    return _norm(NormedSum(Terms(x), x, weight, eps, quantizes), None, None)


def _norm(call: NormedSum, rows: Tensor | None, sums: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the norm of rows and a call's residual, its codes and scales; write the sums."""
    residual, quantizes, ids = call.residual.contiguous(), call.quantizes, call.rows.ids
    normed = torch.empty_like(residual)
    codes, scales = empty_codes(normed, quantizes)
    num_tokens, width = residual.shape
    columns = triton.next_power_of_2(width)
    if num_tokens:
        add_norm_kernel[(num_tokens,)](
            rows,
            ids,
            call.rows.num_ids,
            residual,
            call.weight,
            normed,
            codes if quantizes else None,
            scales if quantizes else None,
            scales.stride(1),
            sums,
            call.eps,
            WIDTH=width,
            COLUMNS=columns,
            TERMS=0 if ids is None else ids.shape[1],
            num_warps=min(max(1, columns // 512), 16),
        )
    return normed, codes, scales
