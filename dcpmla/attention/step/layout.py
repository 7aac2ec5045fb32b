"""The numbers of a step's tokens, computed on the device from its requests' (`lay_out`)."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from dcpmla.attention.step.table import StepTable, StepTokens
from dcpmla.config import DCPConfig
from dcpmla.ownership import Owner


class StepTraits(NamedTuple):
    """Properties of a model's attention that its steps depend on; dense MLA has the defaults.

    Attributes:
        plan: Plan of the caches, for layers that read it.
        block_tokens: Positions that a block id covers, over all ranks; None for those of latents.
        num_states: Number of requests' states in the cache; 0 where it has none.
        has_slots: Whether each token has a slot in the cache's blocks.
        absorbs_pieces: Whether pieces of prompts, of any number of tokens, may attend with absorbed queries.
        has_static_decodes: Whether the graphs of a step with prompts can include the attention of its decodes.
        takes_chunks: Whether linear attention computes long pieces in chunks.
        max_decode_len: Maximum new tokens of a decode; None for any number.
    """

    plan: Any = None
    block_tokens: int | None = None
    num_states: int = 0
    has_slots: bool = True
    absorbs_pieces: bool = True
    has_static_decodes: bool = True
    takes_chunks: bool = False
    max_decode_len: int | None = None


@dataclass(frozen=True)
class StepLayout:
    """The layout of steps over the caches of one rank.

    Attributes:
        dcp: Layout of the cache over the ranks.
        owner: This rank, as the owner of tokens.
        device: Device of the steps' tensors.
        traits: What steps depend on in the model's attention.
    """

    dcp: DCPConfig
    owner: Owner
    device: torch.device
    traits: StepTraits = StepTraits()

    @property
    def block_tokens(self) -> int:
        """Return the positions that a block id covers, over all ranks."""
        return self.traits.block_tokens or self.dcp.virtual_block_size


def lay_out(table: StepTable, tokens: StepTokens, layout: StepLayout) -> None:
    """Write the numbers of tokens: those of a request from its first position on, moved back by its rejected drafts.
    A request with fewer tokens than rows repeats its last one. Write table.begin and table.end, too.
    """
    if tokens.positions.is_cuda:
        from dcpmla.attention.step import kernels  # triton exists on Linux only

        per_rank, traits = layout.block_tokens // layout.owner.size, layout.traits
        kernels.lay_out(table, tokens, layout.owner, per_rank, traits.has_slots)
        return
    numbers = StepTable(*(column.numpy() for column in table))  # NumPy takes a tenth of torch's time on a CPU
    owner, num_rows, num_tokens = layout.owner, len(tokens.positions), numbers.num_tokens
    first = (numbers.first_position - numbers.num_rejected) * (num_tokens > 0)
    numbers.begin[:], numbers.end[:] = first, first + num_tokens
    request = row = np.arange(num_rows)
    if len(num_tokens) == num_rows and num_tokens.max() == 1 == num_tokens.min():
        positions, is_written = first.astype(np.int64), True
        seen = positions + 1
    else:
        request = np.searchsorted(numbers.row_start[1:], row, "right")
        request *= request < len(num_tokens)
        num, index = num_tokens[request], row - numbers.row_start[request]
        is_here = (num > 0) & (row < numbers.row_start[-1])
        positions = (first[request] + np.minimum(index, num - 1)) * is_here
        seen, is_written = (positions + 1) * is_here, is_here & (index < num)
    local = owner.local_seq_lens(seen) * (row < numbers.num_attending)
    slots: np.ndarray | int = -1
    if layout.traits.has_slots:
        block, offset = np.divmod(positions, layout.block_tokens)
        blocks = numbers.block_table[request, block].astype(np.int64)
        mine = blocks * (layout.block_tokens // owner.size) + owner.local_index(offset)
        slots = np.where(is_written & (owner.rank_of(offset) == owner.rank), mine, -1)
    for column, values in zip(tokens, (request, seen, local, positions, slots), strict=True):
        column.numpy()[...] = values
