"""The cache slots of selected tokens."""

from typing import NamedTuple

import torch
from torch import Tensor

from dcpmla.attention.select.step import SelectedTokens
from dcpmla.ownership import Owner


class SlotLayout(NamedTuple):
    """The cache in which selected tokens have their slots.

    Attributes:
        block_table: Block ids of each request [num_reqs, max_blocks] int32.
        request: Request of each token [T] int32.
        block_size: Slots of a block on one rank.
        owner: This rank, as the owner of tokens.
    """

    block_table: Tensor
    request: Tensor
    block_size: int
    owner: Owner

    def slots(self, index: Tensor) -> Tensor:
        """Return the slots of local indices [T, N]; those beyond the block table are undefined."""
        size = self.block_size
        last = self.block_table.shape[1] - 1
        blocks = self.block_table[self.request.long()].gather(1, (index // size).clamp(max=last))
        return blocks * size + index % size


def find_slots(layout: SlotLayout, selection: SelectedTokens) -> None:
    """Write the slots of selected positions that this rank owns, and their number (`choose_tokens`)."""
    positions, slots, num_slots, num_first = selection
    known, owner = positions.clamp(min=0).long(), layout.owner
    is_mine = (positions >= 0) & (owner.rank_of(known) == owner.rank)
    owned = layout.slots(owner.local_index(known))
    first = torch.sort(~is_mine, dim=1, stable=True).indices  # this rank's tokens first, in stable order
    index = torch.arange(positions.shape[1], device=slots.device).expand_as(positions)
    if num_first is not None:
        index = index + num_first[:, None]
    slots.scatter_(1, index, owned.gather(1, first).to(slots.dtype))
    num_slots.copy_(is_mine.sum(1) + (0 if num_first is None else num_first))
