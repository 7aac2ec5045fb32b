"""A Triton kernel that selects windows, with its launcher; `attention/layers/windowed/select.py` specifies it."""

import triton
import triton.language as tl
from torch import Tensor

from dcpmla.attention.select.slots import SlotLayout
from dcpmla.attention.select.step import SelectedTokens


@triton.jit
def _local_len(seq_len, dcp_rank, dcp_size, interleave):
    """Return the number of a rank's tokens among the first seq_len tokens (`ownership.local_seq_lens`)."""
    turn = dcp_size * interleave
    remainder = seq_len % turn - dcp_rank * interleave
    return seq_len // turn * interleave + tl.minimum(tl.maximum(remainder, 0), interleave)


@triton.jit(do_not_specialize=["table_stride", "block_size", "dcp_rank", "dcp_size", "interleave"])
def window_kernel(
    table_ptr,
    request_ptr,
    lens_ptr,
    positions_ptr,
    slots_ptr,
    num_slots_ptr,
    table_stride,
    block_size,
    dcp_rank,
    dcp_size,
    interleave,
    WINDOW: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Select a token's window; one program per token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    seq_len = tl.load(lens_ptr + token)
    position = tl.maximum(seq_len - 1 - column, -1)
    tl.store(positions_ptr + token * WINDOW + column, position, mask=column < WINDOW)
    first = _local_len(tl.maximum(seq_len - WINDOW, 0), dcp_rank, dcp_size, interleave)
    num_slots = _local_len(seq_len, dcp_rank, dcp_size, interleave) - first
    index, is_slot = first + column, column < num_slots
    table_ptr += tl.load(request_ptr + token).to(tl.int64) * table_stride
    block = tl.load(table_ptr + index // block_size, mask=is_slot, other=0)
    tl.store(slots_ptr + token * WINDOW + column, block * block_size + index % block_size, mask=is_slot)
    tl.store(num_slots_ptr + token, num_slots)


def select_window(seq_lens: Tensor, layout: SlotLayout, selection: SelectedTokens) -> None:
    """Compute `windowed.select.select_window` in one kernel."""
    num_tokens, window = selection.positions.shape
    if num_tokens:
        table, request, block_size, owner = layout
        tensors = table, request, seq_lens, *selection[:3]
        columns = triton.next_power_of_2(window)
        window_kernel[(num_tokens,)](*tensors, table.stride(0), block_size, *owner, WINDOW=window, COLUMNS=columns)
