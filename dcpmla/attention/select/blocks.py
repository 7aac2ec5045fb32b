"""Candidate blocks: an indexer chooses the blocks of consecutive keys that later indexers select among.

A block's score is the best of its keys' scores. All ranks know each token's blocks: the ranks' best ones are merged as
their best keys are, because each block is whole on one rank.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dcpmla.attention.select.slots import SlotLayout
from dcpmla.attention.select.step import SelectedTokens
from dcpmla.attention.select.topk import choose_tokens, local_candidates
from dcpmla.ownership import Owner


class Candidates(NamedTuple):
    """The candidate blocks of a step's tokens.

    Attributes:
        blocks: Numbers of each token's blocks [T, K] int32, -1 after the last; the same on all DCP ranks.
        block_size: Number of keys of a block.
        is_source: Whether the indexer chooses the blocks; else it selects among their keys.
    """

    blocks: Tensor
    block_size: int
    is_source: bool

    def rows(self, tokens: slice) -> "Candidates":
        """Return the candidates of some of the tokens, in the same memory."""
        return self._replace(blocks=self.blocks[tokens])

    def choose(
        self,
        scores: Tensor,
        lens: tuple[Tensor, Tensor],
        owner: Owner,
        gather: Callable[[Tensor], Tensor],
    ) -> None:
        """Write the blocks of the best scores, and the block of each token's last key. Collective.

        Args:
            scores: Result [T, N] of `index_scores` for this rank's keys, set to -inf after a token's keys; N is whole
                blocks.
            lens: Number of each token's keys on all ranks, and on this rank, [T] int32.
            owner: This rank, as the owner of keys; its interleave is whole blocks.
            gather: Gather of all ranks' candidates (`Exchange.gather_candidates`).
        """
        size, of_blocks = self.block_size, self._of_blocks(owner)
        index = torch.arange(scores.shape[1], device=scores.device)
        best = scores.masked_fill_(index >= lens[1][:, None], -torch.inf).unflatten(1, (-1, size)).amax(2)
        num_blocks, num_local = ((each + size - 1) // size for each in lens)
        last = (num_blocks - 1).clamp(min=0)
        position = of_blocks.local_index(last)[:, None].long()
        is_mine = (of_blocks.rank_of(last) == of_blocks.rank)[:, None]
        position = position.clamp(max=best.shape[1] - 1)
        best.scatter_(1, position, torch.where(is_mine, torch.inf, best.gather(1, position)))
        local = local_candidates(best, num_blocks, num_local, self.blocks.shape[1], of_blocks)
        table, request = index[None, : best.shape[1]].int(), torch.zeros_like(num_blocks)
        unread = torch.empty_like(self.blocks), torch.empty_like(num_blocks)
        order = SlotLayout(table, request, 1, of_blocks)
        choose_tokens(gather(local).flatten(1), order, SelectedTokens(self.blocks, *unread))

    def exclude_(self, scores: Tensor, owner: Owner) -> None:
        """Set the scores [T, N] of this rank's keys outside the blocks to -inf."""
        of_blocks = self._of_blocks(owner)
        by_block = scores.unflatten(1, (-1, self.block_size))
        known = self.blocks.clamp(min=0).long()
        is_mine = (self.blocks >= 0) & (of_blocks.rank_of(known) == of_blocks.rank)
        index = of_blocks.local_index(known).where(is_mine, by_block.shape[1])
        is_outside = torch.ones(len(scores), by_block.shape[1] + 1, dtype=torch.bool, device=scores.device)
        is_outside.scatter_(1, index, False)
        by_block.masked_fill_(is_outside[:, :-1, None], -torch.inf)

    def _of_blocks(self, owner: Owner) -> Owner:
        """Return a rank as the owner of blocks."""
        return Owner(owner.rank, owner.size, owner.interleave // self.block_size)
