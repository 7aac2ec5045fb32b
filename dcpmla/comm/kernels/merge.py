"""Triton kernels around a collective exchange, each with its launcher; `dcpmla.merge` is their reference."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dcpmla.comm.kernels.merge_tree import merge_tree


@triton.jit
def shares(lse):
    """Return the shares [N] of a row's parts in the merged row, from their LSEs [N], and the merged LSE."""
    peak = tl.max(lse, 0)
    # -inf - -inf is NaN: a row that is empty everywhere takes weight 0.
    peak = tl.where(peak == -float("inf"), 0.0, peak)
    weight = tl.exp(lse - peak)
    total = tl.sum(weight, 0)
    divisor = tl.where(total != 0, total, 1.0)
    return weight / divisor, tl.where(total != 0, tl.log(divisor) + peak, -float("inf"))


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
    """Merge the parts of one (token, head) per program by a tree."""
    row = tl.program_id(0).to(tl.int64)
    token, head = row // num_heads, row % num_heads
    part = tl.arange(0, PARTS).to(tl.int64)
    lse_at = lse_ptr + part * lse_stride_part + token * lse_stride_token + head * lse_stride_head
    lse = tl.load(lse_at, mask=part < NUM_PARTS, other=-float("inf"))
    column = tl.arange(0, COLUMNS)
    rows_at = (
        out_ptr + part[:, None] * out_stride_part + token * out_stride_token + head * out_stride_head + column[None, :]
    )
    # An empty part is not read: its payload may be NaN.
    is_read = (lse != -float("inf"))[:, None] & (column[None, :] < width)
    rows = tl.load(rows_at, mask=is_read, other=0.0).to(tl.float32)
    merged, merged_lse = merge_tree(rows, lse)
    merged_at, first = merged_ptr + row * width, tl.arange(0, 1)
    tl.store(
        merged_at + first[:, None] + column[None, :],
        merged.to(merged_ptr.dtype.element_ty),
        mask=(column < width)[None, :],
    )
    tl.store(merged_lse_ptr + row + first, merged_lse)


def merge_rows(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `comm.nccl.merge_rows` in one kernel on a GPU, for rows with any strides but contiguous columns.

    Args:
        out: Partial outputs [N, T, H, D], float32, bfloat16 or float16, out.stride(-1) == 1.
        lse: Log-sum-exp [N, T, H], float32.
    Returns:
        Merged out [T, H, D] in its dtype, lse [T, H] float32.
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
        enable_fp_fusion=False,  # all numbers of ranks round alike
    )
    return merged, merged_lse


@triton.jit(do_not_specialize=["rank", "num_tokens"])
def weigh_kernel(
    out_ptr,
    lse_ptr,
    shares_ptr,
    merged_lse_ptr,
    rank,
    num_tokens,
    num_heads,
    width,
    out_stride_token,
    out_stride_head,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Multiply this rank's row of one (token, head of the group) per program by its share.

    It is stored in the order of the heads' owners.
    """
    row = tl.program_id(0).to(tl.int64)
    token, head = row // (SIZE * num_heads), row % (SIZE * num_heads)
    owner, own_row = head // num_heads, token * num_heads + head % num_heads
    part = tl.arange(0, PARTS).to(tl.int64)
    lse_at = lse_ptr + part * num_tokens * (SIZE * num_heads) + row
    share, merged_lse = shares(tl.load(lse_at, mask=part < SIZE, other=-float("inf")))
    share = tl.sum(tl.where(part == rank, share, 0.0), 0)
    if owner == rank:
        tl.store(merged_lse_ptr + own_row, merged_lse)

    column = tl.arange(0, COLUMNS)
    num_read = tl.where(share != 0, width, 0)  # a row without a share is not read: its payload may be NaN
    mine = tl.load(
        out_ptr + token * out_stride_token + head * out_stride_head + column, mask=column < num_read, other=0.0
    )
    shares_at = shares_ptr + (owner * num_tokens * num_heads + own_row) * width + column
    tl.store(shares_at, mine.to(shares_ptr.dtype.element_ty) * share, mask=column < width)


def weigh_rows(out: Tensor, lse: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Compute `comm.nccl.weigh_rows` in one kernel on a GPU.

    Rows may have any strides but contiguous columns; lse is contiguous.
    """
    num_tokens, _, width = out.shape
    size, num_heads = len(lse), out.shape[1] // len(lse)
    shares = out.new_empty(size, num_tokens, num_heads, width, dtype=torch.promote_types(out.dtype, torch.float32))
    merged_lse = lse.new_empty(num_tokens, num_heads)
    weigh_kernel[(num_tokens * size * num_heads,)](
        out,
        lse,
        shares,
        merged_lse,
        rank,
        num_tokens,
        num_heads,
        width,
        *out.stride()[:2],
        SIZE=size,
        PARTS=triton.next_power_of_2(size),
        COLUMNS=triton.next_power_of_2(width),
    )
    return shares, merged_lse
