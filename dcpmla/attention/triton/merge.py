"""Triton kernel that merges one more part of attention into a running result; `dcpmla.merge` specifies it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS = 4096  # Elements of a program: 32 rows of 128.


@triton.jit(do_not_specialize=["num_rows"])
def merge_part_kernel(
    merged_ptr,
    merged_lse_ptr,
    out_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    num_rows,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Merge ROWS rows of (token, head) per program."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    is_row, is_column = row < num_rows, column < WIDTH
    lse = tl.load(lse_ptr + row, mask=is_row, other=-float("inf"))
    part_lse = tl.load(part_lse_ptr + row, mask=is_row, other=-float("inf"))
    peak = tl.maximum(lse, part_lse)
    peak = tl.where(peak == -float("inf"), 0.0, peak)  # -inf - -inf is NaN: a row that is empty in both has weight 0
    weight, part_weight = tl.exp(lse - peak), tl.exp(part_lse - peak)
    total = weight + part_weight
    share = 1.0 / tl.where(total != 0, total, 1.0)
    tl.store(merged_lse_ptr + row, tl.where(total != 0, tl.log(total) + peak, -float("inf")), mask=is_row)

    at = row[:, None] * WIDTH + column[None, :]
    # A row of weight 0 is not read: its payload may be NaN.
    out = tl.load(out_ptr + at, mask=is_column[None, :] & (weight != 0)[:, None], other=0.0)
    part = tl.load(part_ptr + at, mask=is_column[None, :] & (part_weight != 0)[:, None], other=0.0)
    merged = out * (weight * share)[:, None] + part * (part_weight * share)[:, None]
    tl.store(merged_ptr + at, merged.to(merged_ptr.dtype.element_ty), mask=is_column[None, :] & is_row[:, None])


def merge_part(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute `prefill.merge_part` in one kernel, for contiguous rows."""
    merged, merged_lse = torch.empty_like(out, dtype=dtype), torch.empty_like(lse)
    num_rows, width = lse.numel(), out.shape[-1]
    columns = triton.next_power_of_2(width)
    rows = max(1, _ELEMENTS // columns)
    merge_part_kernel[(triton.cdiv(num_rows, rows),)](
        merged, merged_lse, out, lse, part, part_lse, num_rows, WIDTH=width, COLUMNS=columns, ROWS=rows
    )
    return merged, merged_lse
