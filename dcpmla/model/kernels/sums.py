"""The mixture of sums of outputs as a Triton kernel; `dcpmla.model.sums` is the reference."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dcpmla.model.calls import Sums


@triton.jit(do_not_specialize=["num_rows", "num_stored"])
def mix_sums_kernel(
    stored_ptr,
    current_ptr,
    out_ptr,
    score_ptr,
    norm_ptr,
    x_ptr,
    total_ptr,
    num_rows,
    num_stored,
    eps,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute a row of the mixture a program; one sum after the other, by the softmax's running maximum.

    out_ptr: Rows added to the current sum, or None.
    total_ptr: Rows of the new sum; None to store none.
    num_rows: Rows of each stored sum.
    """
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS)
    at, mask = row * WIDTH + column, column < WIDTH
    total = tl.load(current_ptr + at, mask=mask, other=0.0)
    if out_ptr is not None:
        out = tl.load(out_ptr + at, mask=mask, other=0.0).to(tl.float32)
        total = (total.to(tl.float32) + out).to(total.dtype)
    if total_ptr is not None:
        tl.store(total_ptr + at, total, mask=mask)
    score = tl.load(score_ptr + column, mask=mask, other=0.0)
    mixed = total.to(tl.float32)
    highest = tl.sum(mixed * score, 0) * tl.rsqrt(tl.sum(mixed * mixed, 0) / WIDTH + eps)
    weight = 1.0
    for index in range(num_stored):
        value = tl.load(stored_ptr + index * num_rows.to(tl.int64) * WIDTH + at, mask=mask, other=0.0).to(tl.float32)
        logit = tl.sum(value * score, 0) * tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
        higher = tl.maximum(highest, logit)
        before, now = tl.exp(highest - higher), tl.exp(logit - higher)
        mixed, weight, highest = mixed * before + value * now, weight * before + now, higher
    mixed /= weight
    norm = tl.load(norm_ptr + column, mask=mask, other=0.0).to(tl.float32)
    x = mixed * tl.rsqrt(tl.sum(mixed * mixed, 0) / WIDTH + eps) * norm
    tl.store(x_ptr + at, x.to(x_ptr.dtype.element_ty), mask=mask)


def mix_sums(sums: Sums, score: Tensor, norm: Tensor, eps: float, stores: bool) -> tuple[Tensor, Tensor]:
    """Compute `model.sums.mix_sums` in one kernel."""
    stored, num_stored, current, out = sums
    assert current is not None
    num_rows, width = current.shape
    x, columns = torch.empty_like(current), triton.next_power_of_2(width)
    new = torch.empty_like(current) if out is not None and not stores else current.new_empty(0)
    total = stored[num_stored] if stores else new if out is not None else None
    if num_rows:
        mix_sums_kernel[(num_rows,)](
            stored,
            current,
            out,
            score,
            norm,
            x,
            total,
            num_rows,
            num_stored,
            eps,
            WIDTH=width,
            COLUMNS=columns,
            num_warps=min(max(1, columns // 512), 16),
        )
    return x, new
