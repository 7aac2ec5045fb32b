"""The kernel that lays out a step, with its launcher; `layout.lay_out` specifies it."""

import triton
import triton.language as tl

from dcpmla.attention.step.table import StepTable, StepTokens
from dcpmla.ownership import Owner

_ROWS = 128


_VARYING = ["table_stride", "num_rows", "num_reqs", "num_halvings"]


@triton.jit(do_not_specialize=_VARYING)  # else Triton compiles variants for 1 and multiples of 16
def layout_kernel(
    request_ptr,
    seq_lens_ptr,
    local_seq_lens_ptr,
    positions_ptr,
    slots_ptr,
    first_position_ptr,
    num_tokens_ptr,
    num_rejected_ptr,
    begin_ptr,
    end_ptr,
    row_start_ptr,
    num_attending_ptr,
    table_ptr,
    table_stride,
    num_rows,
    num_reqs,
    num_halvings,
    rank,
    BLOCK_SIZE: tl.constexpr,
    DCP_SIZE: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write the numbers of some rows and requests. A binary search finds each row's request."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row, is_request = row < num_rows, row < num_reqs
    first = tl.load(first_position_ptr + row, mask=is_request, other=0)
    first -= tl.load(num_rejected_ptr + row, mask=is_request, other=0)
    num_tokens = tl.load(num_tokens_ptr + row, mask=is_request, other=0)
    begin = tl.where(num_tokens > 0, first, 0)
    tl.store(begin_ptr + row, begin, mask=is_request)
    tl.store(end_ptr + row, begin + num_tokens, mask=is_request)
    low, high = tl.zeros([ROWS], tl.int32), tl.zeros([ROWS], tl.int32) + num_reqs
    for _ in range(num_halvings):  # low: the number of requests that end at or before the row
        middle = (low + high) // 2
        is_open = low < high
        is_before = tl.load(row_start_ptr + 1 + middle, mask=is_open, other=0) <= row
        low = tl.where(is_open & is_before, middle + 1, low)
        high = tl.where(is_open & ~is_before, middle, high)
    is_here = is_row & (low < num_reqs)
    request = tl.where(is_here, low, 0)
    num_tokens = tl.load(num_tokens_ptr + request, mask=is_here, other=0)
    is_here = is_here & (num_tokens > 0)
    index = row - tl.load(row_start_ptr + request, mask=is_here, other=0)
    first = tl.load(first_position_ptr + request, mask=is_here, other=0)
    first -= tl.load(num_rejected_ptr + request, mask=is_here, other=0)
    position = tl.where(is_here, first + tl.minimum(index, num_tokens - 1), 0)
    seen = tl.where(is_here, position + 1, 0)
    block_tokens: tl.constexpr = BLOCK_SIZE * DCP_SIZE
    group: tl.constexpr = DCP_SIZE * INTERLEAVE
    past_first = seen % group - rank * INTERLEAVE
    local = seen // group * INTERLEAVE + tl.minimum(tl.maximum(past_first, 0), INTERLEAVE)
    local = tl.where(row < tl.load(num_attending_ptr), local, 0)
    slot = tl.full([ROWS], -1, tl.int64)
    if HAS_SLOTS:
        column, offset = position // block_tokens, position % block_tokens
        is_written = is_here & (index < num_tokens) & (offset // INTERLEAVE % DCP_SIZE == rank)
        block = tl.load(table_ptr + request.to(tl.int64) * table_stride + column, mask=is_written, other=0)
        at = block.to(tl.int64) * BLOCK_SIZE + offset // group * INTERLEAVE + offset % INTERLEAVE
        slot = tl.where(is_written, at, -1)
    tl.store(request_ptr + row, request, mask=is_row)
    tl.store(seq_lens_ptr + row, seen, mask=is_row)
    tl.store(local_seq_lens_ptr + row, local, mask=is_row)
    tl.store(positions_ptr + row, position.to(tl.int64), mask=is_row)
    tl.store(slots_ptr + row, slot, mask=is_row)


def lay_out(table: StepTable, tokens: StepTokens, owner: Owner, block_size: int, has_slots: bool) -> None:
    """Write a step's numbers, as `layout.lay_out` documents it.

    Args:
        block_size: Rows of a block on one rank.
    """
    num_rows, num_reqs = len(tokens.positions), len(table.num_tokens)
    layout_kernel[(triton.cdiv(max(num_rows, num_reqs), _ROWS),)](
        *tokens,
        table.first_position,
        table.num_tokens,
        table.num_rejected,
        table.begin,
        table.end,
        table.row_start,
        table.num_attending,
        table.block_table,
        table.block_table.stride(0),
        num_rows,
        num_reqs,
        num_reqs.bit_length(),
        owner.rank,
        BLOCK_SIZE=block_size,
        DCP_SIZE=owner.size,
        INTERLEAVE=owner.interleave,
        HAS_SLOTS=has_slots,
        ROWS=_ROWS,
    )
