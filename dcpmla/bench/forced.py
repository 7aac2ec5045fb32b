"""Drafts of which a chosen share is accepted, whatever the model says: the cost of speculation at any acceptance."""

import random
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dcpmla.runtime.drafts import NO_DRAFT, Drafter, Drafts
from dcpmla.runtime.pending import PendingStep
from dcpmla.runtime.request import Request
from dcpmla.upload import upload

_NUM_RANDOM = 1 << 16  # random tokens, from which each step takes some


class ForcedDrafter(Drafter):
    """Drafts of another drafter, each accepted by a random number if those before it are.

    Args:
        drafter: whose work is done; where it has fewer drafts than are wanted, random tokens stand in.
        share: probability that a draft is accepted, in [0, 1].
        drafts_always: in every step, not only where that pays.
    """

    def __init__(
        self, drafter: Drafter, share: float, vocab_size: int, device: torch.device, drafts_always: bool
    ) -> None:
        super().__init__(drafter.num_speculative_tokens)
        self.drafts_always, self.reads_tokens = drafts_always, drafter.reads_tokens
        self._drafter, self._share = drafter, share
        self._rng = random.Random(0)  # the same on all ranks
        rng = torch.Generator().manual_seed(0)
        self._random = torch.randint(vocab_size, (_NUM_RANDOM,), generator=rng).to(device)

    def draft(self, wanted: Sequence[tuple[Request, int]], previous: PendingStep | None) -> Drafts:
        """Return the other's drafts, or random tokens."""
        drafts, nums = self._drafter.draft(wanted, previous), [num for _, num in wanted]
        start = self._rng.randrange(_NUM_RANDOM // 2)
        others = self._random[start : start + sum(nums)]
        if drafts.nums != nums or not any(nums):
            return Drafts(nums, others)
        return Drafts(nums, others.where(drafts.token_ids == NO_DRAFT, drafts.token_ids))

    def num_accepted(self, drafts: Tensor, sampled: Tensor, nums: Sequence[int]) -> Tensor:
        """Draw how many drafts of each request count as accepted."""
        counts = [next((index for index in range(num) if self._rng.random() >= self._share), num) for num in nums]
        (there,) = upload([np.array(counts)], drafts.device)
        return there
