"""Triton kernel that merges one more part of attention into a running result in place; `dcpmla.merge` specifies it."""

import triton
import triton.language as tl
from torch import Tensor

_ROWS = 8  # rows of a program


@triton.jit(do_not_specialize=["num_rows"])
def merge_into_kernel(
    out_ptr, lse_ptr, part_ptr, part_lse_ptr, num_rows, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr
):
    """Merge ROWS rows of (token, head) per program, which is one warp."""
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
    tl.store(lse_ptr + row, tl.where(total != 0, tl.log(total) + peak, -float("inf")), mask=is_row)

    at = row[:, None] * WIDTH + column[None, :]
    # A row of weight 0 is not read: its payload may be NaN.
    out = tl.load(out_ptr + at, mask=is_column[None, :] & (weight != 0)[:, None], other=0.0)
    part = tl.load(part_ptr + at, mask=is_column[None, :] & (part_weight != 0)[:, None], other=0.0).to(out.dtype)
    merged = out * (weight * share)[:, None] + part * (part_weight * share)[:, None]
    tl.store(out_ptr + at, merged.to(out.dtype), mask=is_column[None, :] & is_row[:, None])


def merge_into(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Compute `prefill.merge_into` in one kernel, for contiguous rows."""
    num_rows, width = lse.numel(), out.shape[-1]
    merge_into_kernel[(triton.cdiv(num_rows, _ROWS),)](
        out,
        lse,
        part,
        part_lse,
        num_rows,
        WIDTH=width,
        COLUMNS=triton.next_power_of_2(width),
        ROWS=_ROWS,
        num_warps=1,  # in place: each warp loads all of lse, so of two warps one might store before the other loads
    )
