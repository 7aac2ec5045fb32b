"""Drafts accepted at a chosen rate, whatever the model predicts: the cost of speculation at any acceptance."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from dcpmla.runtime.acceptance import MAX_DRAFT_ROWS, Compared
from dcpmla.runtime.drafts import NO_DRAFT, Drafter, Drafts
from dcpmla.runtime.in_flight import InFlightStep
from dcpmla.runtime.request import Request

_NUM_RANDOM = 1 << 16  # random tokens, from which each step takes some


class ForcedDrafter(Drafter):
    """Drafts of another drafter, each accepted by a random number if the drafts before it are.

    Args:
        drafter: Drafter that runs; where it has fewer drafts than are wanted, random tokens replace them.
        share: Probability that a draft is accepted, in [0, 1].
        drafts_always: Whether to draft in every step, not only where that pays.
    """

    def __init__(
        self, drafter: Drafter, share: float, vocab_size: int, device: torch.device, drafts_always: bool
    ) -> None:
        super().__init__(drafter.num_speculative_tokens)
        self.drafts_always, self.reads_tokens = drafts_always, drafter.reads_tokens
        self._drafter = drafter
        self._rng = random.Random(0)  # the same on all ranks
        rng = torch.Generator().manual_seed(0)
        self._ones = torch.ones(MAX_DRAFT_ROWS, dtype=torch.int64, device=device)
        self._marks = (torch.rand(_NUM_RANDOM, generator=rng) < share).long().to(device)
        self._random = torch.randint(vocab_size, (_NUM_RANDOM,), generator=rng).to(device)

    def draft(self, wanted: Sequence[tuple[Request, int]], previous: InFlightStep | None) -> Drafts:
        """Return the other's drafts, or random tokens."""
        drafts, nums = self._drafter.draft(wanted, previous), [num for _, num in wanted]
        random_ids = self._draw(self._random, sum(nums))
        if drafts.nums != nums or not any(nums):
            return Drafts(nums, random_ids)
        return Drafts(nums, random_ids.where(drafts.token_ids == NO_DRAFT, drafts.token_ids))

    def compared(self, drafts: Tensor, sampled: Tensor, nums: Sequence[int]) -> Compared:
        """Draw which drafts count as right: return ones, and ones for these."""
        return Compared(self._ones[: len(drafts)], self._draw(self._marks, len(sampled)))

    def _draw(self, numbers: Tensor, count: int) -> Tensor:
        start = self._rng.randrange(_NUM_RANDOM // 2)
        return numbers[start : start + count]
