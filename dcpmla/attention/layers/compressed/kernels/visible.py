"""The Triton kernels that list rows with their launchers; `attention/layers/compressed/visible.py` specifies them."""

import triton
import triton.language as tl
from torch import Tensor

from dcpmla.attention.layers.compressed.calls import ChunkEntries, VisibleTokens

_COLUMNS = tl.constexpr(1024)  # Columns of a program or of its step.


@triton.jit
def _count(length, rank, size, interleave):
    """Compute `Owner.local_seq_lens`."""
    rest = length % (size * interleave) - rank * interleave
    return length // (size * interleave) * interleave + tl.minimum(tl.maximum(rest, 0), interleave)


@triton.jit(do_not_specialize=["table_stride", "width", "ratio", "per_block"])
def visible_kernel(
    positions_ptr,
    request_ptr,
    states_ptr,
    table_ptr,
    rows_ptr,
    num_ptr,
    table_stride,
    width,
    ratio,
    per_block,
    window,
    ring_rows,
    rank,
    size,
    interleave,
    HAS_ENTRIES: tl.constexpr,
):
    """List a tile of a token's rows; one program per (token, tile of columns)."""
    token = tl.program_id(0).to(tl.int64)
    request = tl.load(request_ptr + token).to(tl.int64)
    state = tl.load(states_ptr + request)
    end = tl.load(positions_ptr + token).to(tl.int32) + 1
    first = _count(tl.maximum(end - window, 0), rank, size, interleave)
    num_window = _count(end, rank, size, interleave) - first
    num = num_window
    if HAS_ENTRIES:
        num += _count(end // ratio, rank, size, interleave)
    num = tl.where(state >= 0, num, 0)
    if tl.program_id(1) == 0:
        tl.store(num_ptr + token, num)
    column = tl.program_id(1) * _COLUMNS + tl.arange(0, _COLUMNS)
    local = first + column
    position = local // interleave * (size * interleave) + rank * interleave + local % interleave
    rows = state * ring_rows + position % ring_rows
    if HAS_ENTRIES:
        entry = column - num_window
        is_entry = (entry >= 0) & (column < num)
        block = tl.load(table_ptr + request * table_stride + entry // per_block, mask=is_entry, other=0)
        rows = tl.where(is_entry, block * per_block + entry % per_block, rows)
    tl.store(rows_ptr + token * width + column, rows, mask=column < num)


def visible_rows(call: VisibleTokens) -> tuple[Tensor, Tensor]:
    """Compute `visible.visible_rows` in one kernel."""
    *tensors, entry_table, ratio, entries_per_block, window, ring_rows, owner = call
    rows, num = call.new_lists()
    num_tokens, width = rows.shape
    if num_tokens:
        sizes = width, max(1, ratio), entries_per_block, window, ring_rows
        visible_kernel[(num_tokens, triton.cdiv(width, _COLUMNS.value))](
            *tensors, entry_table, rows, num, entry_table.stride(0), *sizes, *owner, HAS_ENTRIES=ratio > 0
        )
    return rows, num


@triton.jit(do_not_specialize=["num_columns", "num_entries"])
def append_kernel(
    rows_ptr, num_ptr, entries_ptr, first_ptr, end_ptr, base_ptr, listed_ptr, num_listed_ptr, num_columns, num_entries
):
    """Copy a token's rows and append its entries in the chunk, tile by tile; one program a token."""
    token = tl.program_id(0).to(tl.int64)
    num = tl.load(num_ptr + token)
    first, end = tl.load(first_ptr + token), tl.load(end_ptr + token)
    shift = tl.load(base_ptr + token) - first
    listed_ptr += token * (num_columns + num_entries)
    for start in range(0, num, _COLUMNS):
        column = start + tl.arange(0, _COLUMNS)
        row = tl.load(rows_ptr + token * num_columns + column, mask=column < num, other=0)
        tl.store(listed_ptr + column, row, mask=column < num)
    for start in range(0, num_entries, _COLUMNS):
        column = start + tl.arange(0, _COLUMNS)
        entry = tl.load(entries_ptr + token * num_entries + column, mask=column < num_entries, other=-1)
        is_here = (entry >= first) & (entry < end)
        rank = tl.cumsum(is_here.to(tl.int32), 0) - 1
        tl.store(listed_ptr + num + rank, entry + shift, mask=is_here)
        num += tl.sum(is_here.to(tl.int32), 0)
    tl.store(num_listed_ptr + token, num)


def append_entries(rows: Tensor, num: Tensor, entries: Tensor, chunk: ChunkEntries) -> tuple[Tensor, Tensor]:
    """Compute `visible.append_entries` in one kernel."""
    num_tokens, num_columns = rows.shape
    num_entries = entries.shape[1]
    listed, num_listed = rows.new_empty(num_tokens, num_columns + num_entries), num.new_empty(num_tokens)
    if num_tokens:
        append_kernel[(num_tokens,)](
            rows.contiguous(), num, entries.contiguous(), *chunk, listed, num_listed, num_columns, num_entries
        )
    return listed, num_listed
