"""Triton kernel that gates attention's output, with its launcher; `attention/output/ops.py` specifies it."""

import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 1024


@triton.jit(do_not_specialize=["first_row"])
def gate_kernel(
    values_ptr,
    gates_ptr,
    first_row,
    width,
    head_dim,
    values_stride,
    gates_stride_row,
    gates_stride_head,
    COLUMNS: tl.constexpr,
):
    """Multiply a tile of a row's columns by its gates; one program per (row, tile)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < width
    values_ptr += (first_row + row) * values_stride + column
    gates_ptr += row * gates_stride_row + column // head_dim * gates_stride_head + column % head_dim
    values = tl.load(values_ptr, mask=mask, other=0.0)
    gates = tl.sigmoid(tl.load(gates_ptr, mask=mask, other=0.0).to(tl.float32))
    tl.store(values_ptr, (values.to(tl.float32) * gates).to(values.dtype), mask=mask)


def gate_rows(values: Tensor, first_row: int, gates: Tensor) -> None:
    """Compute `ops.gate_rows_` in one kernel."""
    num_rows, num_heads, head_dim = gates.shape
    width = num_heads * head_dim
    if num_rows:
        columns = min(_COLUMNS, triton.next_power_of_2(width))
        gate_kernel[(num_rows, triton.cdiv(width, columns))](
            values,
            gates,
            first_row,
            width,
            head_dim,
            values.stride(0),
            *gates.stride()[:2],
            COLUMNS=columns,
        )
