"""The numbers of a padded step, in one memory, and moving requests back in it."""

from typing import Any, NamedTuple, Self

import torch

from dcpmla import ownership
from dcpmla.cache.compressed import AnyPlan

UNWRITTEN = -2  # the slot of a row that is never written; -1 for one that another rank writes
_ALIGNMENT = 4  # words: columns begin at multiples of 16 bytes
_NUM_COLUMNS = 11  # of int32; those of int64 take two


class Numbers(NamedTuple):
    """A step's integers as parts of one int32 memory: columns for all rows, then the block table row by row, so that
    those of a small batch are a front of it. Tensors of the device, or arrays of the host.

    Attributes:
        token_ids, positions, slot_mapping: [rows] int64.
        local_seq_lens, seq_lens: [rows] int32; 0 in padding.
        states: [rows] int32, those of requests in front.
        num_rejected: [rows] int64, drafts that requests lose, in front.
        block_table: [num_reqs, max_blocks] int32.
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
        """Cut a memory of `num_words`."""
        words = _column_words(num_rows)
        wide = (memory[at * words : at * words + 2 * num_rows].view(int64) for at in (0, 2, 4, 9))
        ids, positions, slots, num_rejected = wide
        lens, seq_lens, states = (memory[at * words : at * words + num_rows] for at in (6, 7, 8))
        table = memory[_NUM_COLUMNS * words :].reshape(-1, max_blocks)
        return cls(ids, positions, slots, lens, seq_lens, states, num_rejected, table)

    def front(self, num_rows: int, num_reqs: int) -> "Numbers":
        """Return the numbers of a batch: the first rows, and requests."""
        *columns, num_rejected, table = self
        return Numbers._make([*(column[:num_rows] for column in columns), num_rejected[:num_reqs], table[:num_reqs]])


def num_words(num_rows: int, num_reqs: int, max_blocks: int) -> int:
    """Return the words of the memory of `Numbers` that batches of so many requests need."""
    return _NUM_COLUMNS * _column_words(num_rows) + num_reqs * max_blocks


def _column_words(num_rows: int) -> int:
    return -(-num_rows // _ALIGNMENT) * _ALIGNMENT


def move_back(batch: Numbers, sizes: AnyPlan, dcp_rank: int) -> None:
    """Move requests of equally many rows each back by their rejected drafts, in place: positions, slots (`UNWRITTEN`
    ones stay) and lengths (padding keeps its 0).

    Args:
        batch: on the device (`Numbers.front`).
        sizes: of the cache.
        dcp_rank: this rank's number in its DCP group.
    """
    positions, slots, num_rejected = batch.positions, batch.slot_mapping, batch.num_rejected
    if positions.is_cuda:
        from dcpmla.runtime.kernels import layout  # triton is there on Linux only

        layout.move_back(batch, sizes, dcp_rank)
        return
    request = torch.arange(len(num_rejected)).repeat_interleave(len(positions) // len(num_rejected))
    is_padding, is_written = batch.seq_lens == 0, slots != UNWRITTEN
    positions -= num_rejected[request]
    offsets = positions % sizes.block_tokens
    index = ownership.local_index(offsets, sizes.dcp_size, sizes.interleave)
    is_mine = ownership.owner_rank(offsets, sizes.dcp_size, sizes.interleave) == dcp_rank
    blocks = batch.block_table[request, positions // sizes.block_tokens]
    rows_of_block = sizes.block_tokens // sizes.dcp_size
    slots[is_written] = (blocks * rows_of_block + index).where(is_mine, -1)[is_written]
    batch.seq_lens[:] = (positions + 1).where(~is_padding, 0)
    lens = ownership.local_seq_lens(positions + 1, sizes.dcp_size, dcp_rank, sizes.interleave)
    batch.local_seq_lens[:] = lens.where(~is_padding, 0)
