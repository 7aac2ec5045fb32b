"""The kernel that lays out a padded step, with its launcher; `runtime/layout.py: lay_out` specifies it."""

import triton
import triton.language as tl

from dcpmla.attention.build import StepBuilder
from dcpmla.runtime.numbers import Numbers, Rows

_ROWS = 128


@triton.jit(do_not_specialize=["num_rows"])  # else Triton compiles variants for 1 and multiples of 16
def layout_kernel(
    positions_ptr,
    slots_ptr,
    local_seq_lens_ptr,
    seq_lens_ptr,
    num_rejected_ptr,
    first_position_ptr,
    num_tokens_ptr,
    table_ptr,
    table_stride,
    num_rows,
    rank,
    QUERY_LEN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DCP_SIZE: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write the numbers of some rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    request, index = row // QUERY_LEN, row % QUERY_LEN
    num_tokens = tl.load(num_tokens_ptr + request, mask=is_row, other=0)
    here = num_tokens > 0
    first = tl.load(first_position_ptr + request, mask=here, other=0)
    first -= tl.load(num_rejected_ptr + request, mask=here, other=0)
    position = tl.where(here, first + tl.minimum(index, num_tokens - 1), 0)
    seen = tl.where(here, position + 1, 0)
    block_tokens: tl.constexpr = BLOCK_SIZE * DCP_SIZE
    group: tl.constexpr = DCP_SIZE * INTERLEAVE
    past_first = seen % group - rank * INTERLEAVE
    local = seen // group * INTERLEAVE + tl.minimum(tl.maximum(past_first, 0), INTERLEAVE)
    slot = tl.full([ROWS], -1, tl.int64)
    if HAS_SLOTS:
        column, offset = position // block_tokens, position % block_tokens
        is_written = here & (index < num_tokens) & (offset // INTERLEAVE % DCP_SIZE == rank)
        block = tl.load(table_ptr + request * table_stride + column, mask=is_written, other=0).to(tl.int64)
        slot = tl.where(is_written, block * BLOCK_SIZE + offset // group * INTERLEAVE + offset % INTERLEAVE, -1)
    tl.store(positions_ptr + row, position.to(tl.int64), mask=is_row)
    tl.store(slots_ptr + row, slot, mask=is_row)
    tl.store(local_seq_lens_ptr + row, local.to(tl.int32), mask=is_row)
    tl.store(seq_lens_ptr + row, seen.to(tl.int32), mask=is_row)


def lay_out(numbers: Numbers, rows: Rows, steps: StepBuilder) -> None:
    """Write a batch's rows, as `runtime/layout.py: lay_out` documents it."""
    num_rows = len(rows.positions)
    layout_kernel[(triton.cdiv(num_rows, _ROWS),)](
        *rows,
        numbers.num_rejected,
        numbers.first_position,
        numbers.num_tokens,
        numbers.block_table,
        numbers.block_table.stride(0),
        num_rows,
        steps.owner.rank,
        QUERY_LEN=num_rows // len(numbers.num_tokens),
        BLOCK_SIZE=steps.block_tokens // steps.owner.size,
        DCP_SIZE=steps.owner.size,
        INTERLEAVE=steps.owner.interleave,
        HAS_SLOTS=steps.has_slots,
        ROWS=_ROWS,
    )
