"""The numbers of a padded step: its requests' numbers, which the host sends, and its rows' numbers."""

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

_ALIGNMENT = 4  # words: parts begin at multiples of 16 bytes


class Numbers(NamedTuple):
    """The numbers of a padded batch that the host sends, as parts of one int32 memory; all zeros is padding. Tensors of
    the device, or arrays of the host.

    Attributes:
        token_ids: [rows] int64.
        num_rejected: [num_reqs] int64, rejected drafts: the number of positions that requests are moved back by.
        first_position: [num_reqs] int32, position of the first of the step's tokens, before it is moved back.
        num_tokens: [num_reqs] int32, tokens of each request in the step; 0 for a request of padding.
        states: [num_reqs] int32, index of the state plus one, 0 for none.
        block_table: [num_reqs, max_blocks] int32.
    """

    token_ids: Any
    num_rejected: Any
    first_position: Any
    num_tokens: Any
    states: Any
    block_table: Any

    @classmethod
    def of(cls, memory: Any, int64: Any, num_rows: int, num_reqs: int, max_blocks: int) -> Self:
        """Cut a memory of `num_words`."""
        parts, start = [], 0
        for size in _sizes(num_rows, num_reqs, max_blocks):
            parts.append(memory[start : start + size])
            start += -(-size // _ALIGNMENT) * _ALIGNMENT
        ids, num_rejected, first, num_tokens, states, table = parts
        wide, table = (ids.view(int64), num_rejected.view(int64)), table.reshape(num_reqs, max_blocks)
        return cls(*wide, first, num_tokens, states, table)


def num_words(num_rows: int, num_reqs: int, max_blocks: int) -> int:
    """Return the words of the memory of `Numbers`."""
    return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in _sizes(num_rows, num_reqs, max_blocks))


def _sizes(num_rows: int, num_reqs: int, max_blocks: int) -> tuple[int, ...]:
    return 2 * num_rows, 2 * num_reqs, num_reqs, num_reqs, num_reqs, num_reqs * max_blocks


class Rows(NamedTuple):
    """The numbers of a padded batch's rows, equally many of each request, [rows] on the device.

    Attributes:
        positions, slot_mapping: int64; the slot is -1 in padding, where another rank writes the token, in rows that
            repeat others, and with DeepSeek-V4's caches, whose slots follow from states and positions.
        local_seq_lens, seq_lens: int32, tokens up to the row's on this rank and on all; 0 in padding.
    """

    positions: Tensor
    slot_mapping: Tensor
    local_seq_lens: Tensor
    seq_lens: Tensor

    @classmethod
    def empty(cls, num_rows: int, device: torch.device) -> Self:
        """Return memory for the given number of rows."""
        dtypes = torch.int64, torch.int64, torch.int32, torch.int32
        return cls(*(torch.empty(num_rows, dtype=dtype, device=device) for dtype in dtypes))

    def front(self, num_rows: int) -> "Rows":
        """Return the first rows."""
        return Rows(*(column[:num_rows] for column in self))
