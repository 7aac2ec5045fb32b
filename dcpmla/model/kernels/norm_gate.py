"""Triton kernel of the gates of norms' rows, with its launcher; `model/norm_gate.py` specifies it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dcpmla.parallel.formats import BLOCK
from dcpmla.parallel.kernels.quantize import to_codes
from dcpmla.parallel.quantized import empty_codes

_MAX_ROWS = 64  # maximum rows of x per program
_BLOCK = tl.constexpr(BLOCK)  # columns of x per program: a group of codes
_MAX_RANK = 64  # maximum columns of low in one product


@triton.jit(do_not_specialize=["num_rows", "scales_stride"])
def gate_kernel(
    x_ptr,
    low_ptr,
    up_ptr,
    out_ptr,
    codes_ptr,
    scales_ptr,
    scales_stride,
    num_rows,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Gate a tile of rows and columns; one program per tile."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.program_id(1) * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    is_row = row < num_rows
    logits = tl.zeros([ROWS, _BLOCK], tl.float32)
    for first in range(0, RANK, RANKS):
        rank = first + tl.arange(0, RANKS)
        low = tl.load(low_ptr + row * RANK + rank[None, :], mask=is_row & (rank[None, :] < RANK), other=0.0)
        wide = low.to(tl.float32)
        up_mask = (rank[:, None] < RANK) & (column < WIDTH)
        up = tl.load(up_ptr + column * RANK + rank[:, None], mask=up_mask, other=0.0)
        logits = tl.dot((wide * tl.sigmoid(wide)).to(x_ptr.dtype.element_ty), up, logits, input_precision="ieee")
    mask = is_row & (column < WIDTH)
    x = tl.load(x_ptr + row * WIDTH + column, mask=mask, other=0.0)
    gated = (x.to(tl.float32) * tl.sigmoid(logits.to(x_ptr.dtype.element_ty).to(tl.float32))).to(x_ptr.dtype.element_ty)
    tl.store(out_ptr + row * WIDTH + column, gated, mask=mask)
    if codes_ptr is not None:
        codes, scales = to_codes(gated.to(tl.float32))
        tl.store(codes_ptr + row * WIDTH + column, codes, mask=mask)
        at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        tl.store(scales_ptr + at + tl.program_id(1) * scales_stride, scales, mask=at < num_rows)


def gate_norm(x: Tensor, low: Tensor, up: Tensor, quantizes: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `norm_gate.gate_norm` in one kernel."""
    x, low = x.contiguous(), low.contiguous()
    out = torch.empty_like(x)
    codes, scales = empty_codes(out, quantizes)
    (num_rows, width), rank = x.shape, low.shape[1]
    rows = min(_MAX_ROWS, max(16, triton.next_power_of_2(num_rows)))  # 16: the least that tl.dot takes
    if num_rows:
        gate_kernel[(triton.cdiv(num_rows, rows), triton.cdiv(width, BLOCK))](
            x,
            low,
            up,
            out,
            codes if quantizes else None,
            scales if quantizes else None,
            scales.stride(1),
            num_rows,
            WIDTH=width,
            RANK=rank,
            ROWS=rows,
            RANKS=min(_MAX_RANK, max(16, triton.next_power_of_2(rank))),
        )
    return out, codes, scales
