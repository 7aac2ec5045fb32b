"""Outputs of the portable decode kernel. Each part of a request that is cut stores a partial output, and the last part
to arrive merges them.
"""

import triton
import triton.language as tl


@triton.jit
def _merge_parts(partials_ptr, partial_lse_ptr, first_part, num_parts, ROWS: tl.constexpr, LATENT: tl.constexpr):
    """Merge the partial outputs of all parts of a request into out [ROWS, LATENT] and lse [ROWS]."""
    row, column = tl.arange(0, ROWS), tl.arange(0, LATENT)
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, LATENT], tl.float32)
    for part in range(0, num_parts):
        index = (tl.program_id(1) * tl.num_programs(0) + first_part + part) * 2 + (part == 0)
        at = index * ROWS + row
        lse = tl.load(partial_lse_ptr + at, cache_modifier=".cg")
        new_peak = tl.maximum(peak, lse)
        shift = tl.where(new_peak == -float("inf"), 0.0, new_peak)  # -inf - -inf is NaN
        factor, weight = tl.exp(peak - shift), tl.exp(lse - shift)
        partial = tl.load(partials_ptr + at[:, None] * LATENT + column[None, :], cache_modifier=".cg")
        acc = acc * factor[:, None] + partial * weight[:, None]
        total = total * factor + weight
        peak = new_peak
    is_any = total != 0
    total = tl.where(is_any, total, 1.0)
    return acc / total[:, None], tl.where(is_any, peak + tl.log(total), -float("inf"))


@triton.jit
def finish_part(out, lse, counters_ptr, partials_ptr, first_part, num_parts, begins):
    """Store a part's output of a request that num_parts parts share; merge all if this part arrives last.

    Args:
        out, lse: Output of this part [ROWS, LATENT] and [ROWS].
        begins: Whether the request begins in this part, which may also continue another request.
    Returns:
        Whether this part arrived last; out and lse of all parts if it did.
    """
    ROWS: tl.constexpr = out.shape[0]
    LATENT: tl.constexpr = out.shape[1]
    line_part = tl.program_id(1) * tl.num_programs(0)
    partial_lse_ptr = partials_ptr + tl.num_programs(0) * tl.num_programs(1) * 2 * ROWS * LATENT
    is_last = num_parts == 1
    if num_parts > 1:
        at = ((line_part + tl.program_id(0)) * 2 + begins) * ROWS + tl.arange(0, ROWS)
        tl.store(partials_ptr + at[:, None] * LATENT + tl.arange(0, LATENT)[None, :], out)
        tl.store(partial_lse_ptr + at, lse)
        tl.debug_barrier()  # all threads store before one thread signals the arrival
        counter = counters_ptr + line_part + first_part
        is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_parts - 1
        tl.debug_barrier()
        if is_last:
            tl.store(counter, 0)  # the next launch starts from 0
            out, lse = _merge_parts(partials_ptr, partial_lse_ptr, first_part, num_parts, ROWS, LATENT)
    return is_last, out, lse


@triton.jit
def store_rows(out_ptr, lse_ptr, first_row, num_rows, out, lse):
    """Store num_rows rows of the output and their LSE."""
    row, column = tl.arange(0, out.shape[0]), tl.arange(0, out.shape[1])
    out_row = (first_row + row).to(tl.int64)
    at = out_ptr + out_row[:, None] * out.shape[1] + column[None, :]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=row[:, None] < num_rows)
    tl.store(lse_ptr + out_row, lse, mask=row < num_rows)
