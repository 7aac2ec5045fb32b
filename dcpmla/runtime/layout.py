"""The numbers of a padded step, in one memory, and moving requests back in it."""

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from dcpmla import ownership
from dcpmla.cache.compressed import AnyPlan

UNWRITTEN = -2  # the slot of a row that is never written; -1 for one that another rank writes
_ALIGNMENT = 4  # words: columns begin at multiples of 16 bytes


class Numbers(NamedTuple):
    """A step's integers as parts of one int32 memory: columns for all rows, then the block table row by row, so that
    those of a small batch are a front of it. Tensors of the device, or arrays of the host.
    """

    token_ids: Any
    positions: Any
    slot_mapping: Any
    local_seq_lens: Any
    seq_lens: Any
    states: Any
    num_rejected: Any
    block_table: Any

    @classmethod
    def of(cls, memory: Any, int64: Any, num_rows: int, max_blocks: int) -> Self:
        """Cut a memory of at least 11 columns."""
        words = column_words(num_rows)
        wide = (memory[at * words : at * words + 2 * num_rows].view(int64) for at in (0, 2, 4, 9))
        ids, positions, slots, num_rejected = wide
        lens, seq_lens, states = (memory[at * words : at * words + num_rows] for at in (6, 7, 8))
        table = memory[11 * words :].reshape(-1, max_blocks)
        return cls(ids, positions, slots, lens, seq_lens, states, num_rejected, table)


def column_words(num_rows: int) -> int:
    """Return the words of a column of int32."""
    return -(-num_rows // _ALIGNMENT) * _ALIGNMENT


def move_back(
    positions: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    local_seq_lens: Tensor,
    block_table: Tensor,
    num_rejected: Tensor,
    sizes: AnyPlan,
    dcp_rank: int,
) -> None:
    """Move requests of equally many rows each back by some positions, in place.

    Args:
        positions, slots: [rows] int64; a slot of -2 stays.
        seq_lens, local_seq_lens: [rows] int32; where the former is 0, in padding, nothing is to be seen of them.
        block_table: [num_reqs, max_blocks] int32.
        num_rejected: [num_reqs] int64.
    """
    if positions.is_cuda:
        from dcpmla.runtime.kernels import layout  # triton is there on Linux only

        layout.move_back(
            positions, slots, seq_lens, local_seq_lens, block_table, num_rejected, sizes, dcp_rank, UNWRITTEN
        )
        return
    request = torch.arange(len(num_rejected)).repeat_interleave(len(positions) // len(num_rejected))
    is_padding, is_written = seq_lens == 0, slots != UNWRITTEN
    positions -= num_rejected[request]
    offsets = positions % sizes.block_tokens
    index = ownership.local_index(offsets, sizes.dcp_size, sizes.interleave)
    is_mine = ownership.owner_rank(offsets, sizes.dcp_size, sizes.interleave) == dcp_rank
    blocks = block_table[request, positions // sizes.block_tokens]
    rows_of_block = sizes.block_tokens // sizes.dcp_size
    slots[is_written] = (blocks * rows_of_block + index).where(is_mine, -1)[is_written]
    seq_lens[:] = (positions + 1).where(~is_padding, 0)
    lens = ownership.local_seq_lens(positions + 1, sizes.dcp_size, dcp_rank, sizes.interleave)
    local_seq_lens[:] = lens.where(~is_padding, 0)
