"""Triton kernel of sums of terms, and the load by which other kernels add them; `comm.terms.add_terms` is the
specification.
"""

import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = tl.constexpr(1024)


@triton.jit
def load_sum(rows_ptr, ids_ptr, num_ids, row, at, mask, type: tl.constexpr, WIDTH: tl.constexpr, TERMS: tl.constexpr):
    """Return elements of rows [T, WIDTH] in float32, each the sum of TERMS terms unless TERMS is 0.

    Args:
        rows_ptr, ids_ptr, num_ids: `Terms`; rows may be integers with the bits of `type`.
        row: Row of each element, also one of T where mask is false; a block that broadcasts to `at`.
        at: Offset of each element in [T, WIDTH].
    """
    if TERMS == 0:
        total = tl.load(rows_ptr + at, mask=mask, other=0).to(type, bitcast=True).to(tl.float32)
    else:
        total = tl.zeros(at.shape, tl.float32)
        for i in tl.static_range(TERMS):
            id = tl.load(ids_ptr + row * TERMS + i)
            is_here = (id >= 0) & (id < num_ids)  # others were never written
            term = tl.load(rows_ptr + at + (row * (TERMS - 1) + i) * WIDTH, mask=mask & is_here, other=0)
            total += term.to(type, bitcast=True).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["num_ids"])
def sum_kernel(rows_ptr, ids_ptr, out_ptr, num_ids, WIDTH: tl.constexpr, TERMS: tl.constexpr):
    """Add the terms of a row; one program per (row, tile of columns)."""
    row = tl.program_id(0).to(tl.int64) + tl.zeros([1], tl.int64)
    column = tl.program_id(1) * _COLUMNS + tl.arange(0, _COLUMNS)
    at, mask = row * WIDTH + column, column < WIDTH
    type: tl.constexpr = out_ptr.dtype.element_ty
    total = load_sum(rows_ptr, ids_ptr, num_ids, row, at, mask, type, WIDTH, TERMS)
    tl.store(out_ptr + at, total.to(type), mask=mask)


def add_terms(rows: Tensor, ids: Tensor | None, num_ids: int) -> Tensor:
    """Compute `comm.terms.add_terms` in one kernel."""
    if ids is None:
        return rows
    (num_rows, num_terms), width = ids.shape, rows.shape[1]
    out = rows.new_empty(num_rows, width)
    if num_rows:
        tiles = triton.cdiv(width, _COLUMNS.value)
        sum_kernel[(num_rows, tiles)](rows, ids, out, num_ids, WIDTH=width, TERMS=num_terms)
    return out
