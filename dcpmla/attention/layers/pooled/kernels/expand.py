"""Triton kernel from selected pools to tokens, with its launcher; `attention/layers/pooled/expand.py` specifies it."""

import triton
import triton.language as tl
from torch import Tensor

from dcpmla.attention.select.kernels.slots import store_slots
from dcpmla.attention.select.slots import SlotLayout
from dcpmla.attention.select.step import SelectedTokens


@triton.jit(
    do_not_specialize=["table_stride", "num_blocks"],
    do_not_specialize_on_alignment=["seq_lens_ptr", "request_ptr", "num_slots_ptr"],
)
def expand_kernel(
    pools_ptr,
    seq_lens_ptr,
    block_table_ptr,
    request_ptr,
    positions_ptr,
    slots_ptr,
    num_slots_ptr,
    pools_stride,
    positions_stride,
    slots_stride,
    table_stride,
    num_blocks,
    NUM_POOLS: tl.constexpr,
    POOL_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DCP_RANK: tl.constexpr,
    DCP_SIZE: tl.constexpr,
    INTERLEAVE: tl.constexpr,
):
    """Store a row's positions, and the slots of this rank's tokens among them; one program per row."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, COLUMNS)
    pool = tl.load(pools_ptr + row * pools_stride + index // POOL_SIZE, mask=index < NUM_POOLS * POOL_SIZE, other=-1)
    after, seq_len = index - tl.sum((pool >= 0).to(tl.int32), 0), tl.load(seq_lens_ptr + row)
    is_unfinished = (after >= 0) & (after < seq_len % POOL_SIZE)
    unfinished = tl.where(is_unfinished, seq_len // POOL_SIZE * POOL_SIZE + after, -1)
    position = tl.where(pool >= 0, pool * POOL_SIZE + index % POOL_SIZE, unfinished)
    tl.store(positions_ptr + row * positions_stride + index, position, mask=index < WIDTH)
    request = tl.load(request_ptr + row).to(tl.int64)
    slots_ptr += row * slots_stride
    table_ptr = block_table_ptr + request * table_stride
    num_slots = store_slots(slots_ptr, position, table_ptr, num_blocks, BLOCK_SIZE, DCP_RANK, DCP_SIZE, INTERLEAVE)
    tl.store(num_slots_ptr + row, num_slots)


def expand_pools(
    pools: Tensor, seq_lens: Tensor, pool_size: int, layout: SlotLayout, selection: SelectedTokens
) -> None:
    """Compute `expand.expand_pools` in one kernel."""
    num_tokens, width = selection.positions.shape
    if num_tokens == 0:
        return
    expand_kernel[(num_tokens,)](
        pools,
        seq_lens,
        *layout[:2],  # block_table, request
        *selection[:3],  # positions, slots, num_slots
        pools.stride(0),
        selection.positions.stride(0),
        selection.slots.stride(0),
        layout.block_table.stride(0),
        layout.block_table.shape[1],
        NUM_POOLS=pools.shape[1],
        POOL_SIZE=pool_size,
        WIDTH=width,
        COLUMNS=triton.next_power_of_2(width),
        BLOCK_SIZE=layout.block_size,
        DCP_RANK=layout.owner.rank,
        DCP_SIZE=layout.owner.size,
        INTERLEAVE=layout.owner.interleave,
        num_warps=8,
    )
