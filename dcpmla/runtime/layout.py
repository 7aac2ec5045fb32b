"""The layout of a step of decodes on the device: from the few numbers of its requests that the host sends to those of
its rows.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from dcpmla import ownership
from dcpmla.cache.compressed import AnyPlan, CompressedPlan

_ALIGNMENT = 4  # words: parts begin at multiples of 16 bytes


class StepRequests(NamedTuple):
    """The requests of a step, as the host knows them.

    Attributes:
        query_lens: [num_reqs] new tokens of each.
        seq_lens: [num_reqs] tokens of each after the step.
        block_tables: [num_reqs] block ids of each, enough for seq_lens.
        states: [num_reqs] where the state of each is in DeepSeek-V4's caches; not looked at with others.
    """

    query_lens: Sequence[int]
    seq_lens: Sequence[int]
    block_tables: Sequence[Sequence[int]]
    states: Sequence[Any] = ()


class Numbers(NamedTuple):
    """The numbers of a padded batch that the host sends, as parts of one int32 memory; all zeros is padding. Tensors of
    the device, or arrays of the host.

    Attributes:
        token_ids: [rows] int64.
        num_rejected: [num_reqs] int64, drafts that requests lose: positions that they are moved back by.
        first_position: [num_reqs] int32, of the first of the step's tokens, before it is moved back.
        num_tokens: [num_reqs] int32, of the step; 0 for a request of padding.
        states: [num_reqs] int32, one more than where the state is, 0 for none.
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
        """Return memory for so many rows."""
        dtypes = torch.int64, torch.int64, torch.int32, torch.int32
        return cls(*(torch.empty(num_rows, dtype=dtype, device=device) for dtype in dtypes))

    def front(self, num_rows: int) -> "Rows":
        """Return the first rows."""
        return Rows(*(column[:num_rows] for column in self))


def lay_out(numbers: Numbers, rows: Rows, plan: AnyPlan, dcp_rank: int) -> None:
    """Write a batch's rows: the tokens of a request from its first position on, moved back by its rejected drafts. A
    request with fewer tokens than rows repeats the last one.

    Args:
        numbers: on the device.
        rows: of the batch.
        plan: of the cache.
        dcp_rank: this rank's number in its DCP group.
    """
    if rows.positions.is_cuda:
        from dcpmla.runtime.kernels import layout  # triton is there on Linux only

        layout.lay_out(numbers, rows, plan, dcp_rank)
        return
    num_reqs, num_rows = len(numbers.num_tokens), len(rows.positions)
    index = torch.arange(num_rows // num_reqs)
    num_tokens = numbers.num_tokens[:, None]
    first = (numbers.first_position - numbers.num_rejected)[:, None]
    is_here = num_tokens > 0
    positions = (first + index.minimum(num_tokens - 1)).where(is_here, 0)
    seen = (positions + 1).where(is_here, 0)
    blocks = numbers.block_table.gather(1, positions // plan.block_tokens)
    offsets = positions % plan.block_tokens
    slots = blocks * (plan.block_tokens // plan.dcp_size)
    slots += ownership.local_index(offsets, plan.dcp_size, plan.interleave)
    is_mine = ownership.owner_rank(offsets, plan.dcp_size, plan.interleave) == dcp_rank
    is_written = is_mine & (index < num_tokens) & (not isinstance(plan, CompressedPlan))
    local = ownership.local_seq_lens(seen, plan.dcp_size, dcp_rank, plan.interleave)
    for column, values in zip(rows, (positions, slots.where(is_written, -1), local, seen), strict=True):
        column.copy_(values.flatten())
