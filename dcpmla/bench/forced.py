"""Drafts of which a chosen share is accepted, whatever the model says: the cost of speculation at any acceptance."""

import random
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from dcpmla.runtime.drafts import Drafter, Drafts
from dcpmla.runtime.pending import PendingStep
from dcpmla.runtime.request import Request
from dcpmla.upload import upload


class ForcedDrafter(Drafter):
    """Drafts of another drafter, each accepted by a random number if those before it are.

    Args:
        drafter: whose work is done; where it has fewer drafts than are wanted, random tokens stand in.
        share: probability that a draft is accepted, in [0, 1].
        drafts_always: in every step, not only where that pays.
    """

    def __init__(self, drafter: Drafter, share: float, vocab_size: int, drafts_always: bool) -> None:
        super().__init__(drafter.num_speculative_tokens)
        self.drafts_always, self.reads_tokens = drafts_always, drafter.reads_tokens
        self._drafter, self._share, self._vocab_size = drafter, share, vocab_size
        self._rng = random.Random(0)  # the same on all ranks

    def draft(self, wanted: Sequence[tuple[Request, int]], previous: PendingStep | None) -> Drafts:
        """Return the other's drafts, or random tokens."""
        drafts, nums = self._drafter.draft(wanted, previous), [num for _, num in wanted]
        if drafts.nums == nums:
            return Drafts(nums, drafts.token_ids.clamp(min=0))
        return Drafts.of([[self._rng.randrange(self._vocab_size) for _ in range(num)] for num in nums])

    def num_accepted(self, drafts: Tensor, sampled: Tensor, nums: Sequence[int]) -> Tensor:
        """Draw how many drafts of each request count as accepted."""
        counts = [next((index for index in range(num) if self._rng.random() >= self._share), num) for num in nums]
        (there,) = upload([np.array(counts)], drafts.device)
        return there
