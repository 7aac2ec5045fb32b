"""Drafts of which a chosen share is accepted, whatever the model says: the cost of speculation at any acceptance."""

import random
from collections.abc import Sequence

from dcpmla.runtime.drafts import Computed, Drafter, Drafts
from dcpmla.runtime.request import Request


class ForcedDrafter(Drafter):
    """Drafts of another drafter, each accepted by a random number if those before it are.

    Args:
        drafter: whose work is done; where it has fewer drafts than are wanted, random tokens stand in.
        share: probability that a draft is accepted, in [0, 1].
        drafts_always: in every step, not only where that pays.
    """

    def __init__(self, drafter: Drafter, share: float, vocab_size: int, drafts_always: bool) -> None:
        super().__init__(drafter.num_speculative_tokens)
        self.drafts_always, self.follows_prompts = drafts_always, drafter.follows_prompts
        self._drafter, self._share, self._vocab_size = drafter, share, vocab_size
        self._rng = random.Random(0)  # the same on all ranks

    def draft(self, wanted: Sequence[tuple[Request, int]], computed: Sequence[Computed]) -> Drafts:
        """Return the other's drafts, or random tokens."""
        drafts, nums = self._drafter.draft(wanted, computed), [num for _, num in wanted]
        if drafts.nums == nums:
            return drafts
        return Drafts.of([[self._rng.randrange(self._vocab_size) for _ in range(num)] for num in nums])

    def num_accepted(self, drafts: Sequence[int], sampled: Sequence[int]) -> int:
        """Draw how many drafts count as accepted."""
        return next((num for num in range(len(drafts)) if self._rng.random() >= self._share), len(drafts))
