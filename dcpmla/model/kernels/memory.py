"""Triton kernels of memories of n-grams; `dcpmla.model.memory` is the reference."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dcpmla.parallel.formats import GROUP

_GROUP = tl.constexpr(GROUP)
_ROWS = 8  # rows of the table that a program reads


@triton.jit(do_not_specialize=["num_rows"])
def look_up_kernel(
    table_ptr, scales_ptr, index_ptr, out_ptr, num_rows, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr
):
    """Copy some rows of the table, dequantized if they have scales.

    num_rows: Number of rows to copy.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    source = tl.load(index_ptr + row, mask=row < num_rows, other=0).to(tl.int64)[:, None]
    is_inside = (row < num_rows)[:, None] & (column < WIDTH)
    values = tl.load(table_ptr + source * WIDTH + column, mask=is_inside).to(tl.float32)
    if scales_ptr is not None:
        scales = tl.load(scales_ptr + source * (WIDTH // _GROUP) + column // _GROUP, mask=is_inside, other=0)
        factors = scales.to(tl.uint32) << 23
        values *= tl.where(factors == 0, 1 << 22, factors).to(tl.uint32).to(tl.float32, bitcast=True)  # 2^-127
    tl.store(out_ptr + row[:, None] * WIDTH + column, values.to(out_ptr.dtype.element_ty), mask=is_inside)


@triton.jit
def add_recalled_kernel(
    streams_ptr,
    recalled_ptr,
    weight_ptr,
    out_ptr,
    eps,
    STREAMS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add to one stream of a token."""
    token, stream = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    mask = column < WIDTH
    at = (token * STREAMS + stream) * WIDTH + column
    recalled_ptr += token * ((STREAMS + 1) * WIDTH) + column
    row = tl.load(streams_ptr + at, mask=mask, other=0.0).to(tl.float32)
    key = tl.load(recalled_ptr + stream * WIDTH, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(recalled_ptr + STREAMS * WIDTH, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + stream * WIDTH + column, mask=mask, other=0.0)
    factor = tl.rsqrt(tl.sum(row * row, 0) / WIDTH + eps) * tl.rsqrt(tl.sum(key * key, 0) / WIDTH + eps)
    likeness = tl.sum(row * key * weight, 0) * factor * (WIDTH**-0.5)
    root = tl.sqrt(tl.maximum(tl.abs(likeness), 1e-6))
    gate = tl.sigmoid(tl.where(likeness < 0, -root, root))
    tl.store(out_ptr + at, (row + gate * value).to(out_ptr.dtype.element_ty), mask=mask)


def look_up(table: Tensor, scales: Tensor | None, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute `model.memory.look_up` in one kernel."""
    num_tokens, num_columns = index.shape
    width, num_rows = table.shape[1], num_tokens * num_columns
    out = torch.empty(num_tokens, num_columns * width, dtype=dtype, device=table.device)
    if num_rows:
        look_up_kernel[(triton.cdiv(num_rows, _ROWS),)](
            table,
            scales,
            index.contiguous(),
            out,
            num_rows,
            WIDTH=width,
            COLUMNS=triton.next_power_of_2(width),
            ROWS=_ROWS,
        )
    return out


def add_recalled(streams: Tensor, recalled: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute `model.memory.add_recalled` in one kernel."""
    streams, recalled, out = streams.contiguous(), recalled.contiguous(), torch.empty_like(streams)
    num_tokens, num_streams, width = streams.shape
    columns = triton.next_power_of_2(width)
    if num_tokens:
        add_recalled_kernel[(num_tokens, num_streams)](
            streams,
            recalled,
            weight,
            out,
            eps,
            STREAMS=num_streams,
            WIDTH=width,
            COLUMNS=columns,
            num_warps=min(max(1, columns // 512), 16),
        )
    return out
