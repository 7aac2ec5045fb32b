"""Triton kernel that scales attention's output by what sinks leave; `attention/output/sinks.py` specifies it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS = 2048  # Elements of a program: 4 rows of 512.


@triton.jit(do_not_specialize=["num_rows"])
def sinks_kernel(
    out_ptr,
    lse_ptr,
    sinks_ptr,
    scaled_ptr,
    num_rows,
    stride_token,
    stride_head,
    lse_stride_token,
    lse_stride_head,
    NUM_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Scale ROWS rows of (token, head) per program."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    token, head, is_row = row // NUM_HEADS, row % NUM_HEADS, row < num_rows
    lse = tl.load(lse_ptr + token * lse_stride_token + head * lse_stride_head, mask=is_row, other=-float("inf"))
    share = 1 / (1 + tl.exp(tl.load(sinks_ptr + head, mask=is_row, other=0.0) - lse))
    # A row of share 0 is not read: its payload may be NaN.
    is_column = column < WIDTH
    mask = is_column & (share > 0)[:, None]
    out = tl.load(out_ptr + (token * stride_token + head * stride_head)[:, None] + column, mask=mask, other=0.0)
    scaled = (out.to(tl.float32) * share[:, None]).to(scaled_ptr.dtype.element_ty)
    tl.store(scaled_ptr + row[:, None] * WIDTH + column, scaled, mask=is_column & is_row[:, None])


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Compute `sinks.apply_sinks` in one kernel, for rows with contiguous columns."""
    scaled = torch.empty(out.shape, dtype=out.dtype, device=out.device)
    num_tokens, num_heads, width = out.shape
    columns = triton.next_power_of_2(width)
    rows = max(1, _ELEMENTS // columns)
    if num_rows := num_tokens * num_heads:
        strides = *out.stride()[:2], *lse.stride()
        sizes = {"NUM_HEADS": num_heads, "WIDTH": width, "COLUMNS": columns, "ROWS": rows}
        sinks_kernel[(triton.cdiv(num_rows, rows),)](out, lse, sinks, scaled, num_rows, *strides, **sizes)
    return scaled
