"""Triton kernels around a collective exchange, each with its launcher; `dcpmla.merge` is their reference."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def merge_kernel(
    out_ptr,
    lse_ptr,
    merged_ptr,
    merged_lse_ptr,
    num_heads,
    width,
    out_stride_part,
    out_stride_token,
    out_stride_head,
    lse_stride_part,
    lse_stride_token,
    lse_stride_head,
    NUM_PARTS: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program a (token, head): weights from the LSEs of all parts, then the weighted sum of their rows."""
    row = tl.program_id(0).to(tl.int64)
    token, head = row // num_heads, row % num_heads
    part = tl.arange(0, PARTS).to(tl.int64)
    lse_at = lse_ptr + part * lse_stride_part + token * lse_stride_token + head * lse_stride_head
    lse = tl.load(lse_at, mask=part < NUM_PARTS, other=-float("inf"))
    peak = tl.max(lse, 0)
    peak = tl.where(peak == -float("inf"), 0.0, peak)  # -inf - -inf is NaN: a row that is empty everywhere takes weight 0
    weight = tl.exp(lse - peak)
    total = tl.sum(weight, 0)
    weight = weight / tl.where(total > 0, total, 1.0)
    tl.store(merged_lse_ptr + row, tl.where(total > 0, tl.log(tl.where(total > 0, total, 1.0)) + peak, -float("inf")))

    column = tl.arange(0, COLUMNS)
    rows_at = out_ptr + part[:, None] * out_stride_part + token * out_stride_token + head * out_stride_head + column[None, :]
    # A part of weight 0 is not read: its payload may be NaN.
    rows = tl.load(rows_at, mask=(weight[:, None] > 0) & (column[None, :] < width), other=0.0).to(tl.float32)
    merged = tl.sum(rows * weight[:, None], 0)
    tl.store(merged_ptr + row * width + column, merged.to(merged_ptr.dtype.element_ty), mask=column < width)


def merge_rows(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """`dcpmla.merge_partials` in one kernel on a GPU, for rows with any strides but contiguous columns.

    Args:
        out: [N, T, H, D], float32, bfloat16 or float16, out.stride(-1) == 1.
        lse: [N, T, H] float32.
    Returns:
        out [T, H, D] in the dtype given, lse [T, H] float32.
    """
    num_parts, num_tokens, num_heads, width = out.shape
    merged = torch.empty(num_tokens, num_heads, width, dtype=out.dtype, device=out.device)
    merged_lse = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=out.device)
    merge_kernel[(num_tokens * num_heads,)](
        out,
        lse,
        merged,
        merged_lse,
        num_heads,
        width,
        *out.stride()[:3],
        *lse.stride(),
        NUM_PARTS=num_parts,
        PARTS=triton.next_power_of_2(num_parts),
        COLUMNS=triton.next_power_of_2(width),
    )
    return merged, merged_lse
