"""The kernel that moves a padded step back, with its launcher; `runtime/layout.py: move_back` specifies it."""

import triton
import triton.language as tl

from dcpmla.cache.compressed import AnyPlan
from dcpmla.runtime.layout import UNWRITTEN, Numbers

_ROWS = 128


@triton.jit
def move_kernel(
    positions_ptr,
    slots_ptr,
    seq_lens_ptr,
    local_seq_lens_ptr,
    table_ptr,
    table_stride,
    num_rejected_ptr,
    num_rows,
    rank,
    QUERY_LEN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DCP_SIZE: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    UNWRITTEN: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Move rows back by their requests' rejected drafts."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = row < num_rows
    request = row // QUERY_LEN
    position = tl.load(positions_ptr + row, mask=here, other=0)
    position -= tl.load(num_rejected_ptr + request, mask=here, other=0)
    block_tokens: tl.constexpr = BLOCK_SIZE * DCP_SIZE
    group: tl.constexpr = DCP_SIZE * INTERLEAVE
    column, offset = position // block_tokens, position % block_tokens
    block = tl.load(table_ptr + request * table_stride + column, mask=here, other=0).to(tl.int64)
    slot = block * BLOCK_SIZE + offset // group * INTERLEAVE + offset % INTERLEAVE
    is_mine = offset // INTERLEAVE % DCP_SIZE == rank
    here = here & (tl.load(seq_lens_ptr + row, mask=here, other=0) > 0)  # not in a request of padding
    seen = position + 1
    past_first = seen % group - rank * INTERLEAVE
    local = seen // group * INTERLEAVE + tl.minimum(tl.maximum(past_first, 0), INTERLEAVE)
    tl.store(positions_ptr + row, position, mask=here)
    is_written = tl.load(slots_ptr + row, mask=here, other=0) != UNWRITTEN
    tl.store(slots_ptr + row, tl.where(is_mine, slot, -1), mask=here & is_written)
    tl.store(seq_lens_ptr + row, seen.to(tl.int32), mask=here)
    tl.store(local_seq_lens_ptr + row, local.to(tl.int32), mask=here)


def move_back(batch: Numbers, sizes: AnyPlan, dcp_rank: int) -> None:
    """Move requests back, as `runtime/layout.py: move_back` documents it."""
    num_rows = len(batch.positions)
    move_kernel[(triton.cdiv(num_rows, _ROWS),)](
        batch.positions,
        batch.slot_mapping,
        batch.seq_lens,
        batch.local_seq_lens,
        batch.block_table,
        batch.block_table.stride(0),
        batch.num_rejected,
        num_rows,
        dcp_rank,
        QUERY_LEN=num_rows // len(batch.num_rejected),
        BLOCK_SIZE=sizes.block_tokens // sizes.dcp_size,
        DCP_SIZE=sizes.dcp_size,
        INTERLEAVE=sizes.interleave,
        UNWRITTEN=UNWRITTEN,
        ROWS=_ROWS,
    )
