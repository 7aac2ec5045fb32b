"""Drafts accepted at chosen rates, whatever the model predicts: the cost of speculation at any acceptance."""

import random
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.runtime.acceptance import MAX_DRAFT_ROWS, Compared
from dcpmla.runtime.drafts import NO_DRAFT, Drafter, Drafts
from dcpmla.runtime.graph import StepGraph
from dcpmla.runtime.in_flight import InFlightStep
from dcpmla.runtime.request import Request
from dcpmla.upload import upload_once

_NUM_RANDOM = 1 << 16  # random tokens, from which each step takes some


def rates_of_length(length: float, num_drafts: int) -> tuple[float, ...]:
    """Return the probability that each draft of a step is accepted, for steps of `length` tokens on average whose
    lengths vary least: ones, a fraction, zeros.

    Args:
        length: Tokens of a step, including the one after the drafts, in [1, 1 + num_drafts].
    Source: vLLM's synthetic_acceptance_length.
    """
    return tuple(min(1.0, max(0.0, length - 1 - index)) for index in range(num_drafts))


def rates_of_share(share: float, num_drafts: int) -> tuple[float, ...]:
    """Return the probability that each draft of a step is accepted, if each is with probability `share` after an
    accepted one.
    """
    return tuple(share ** (1 + index) for index in range(num_drafts))


class SimulatedDrafter(Drafter):
    """Drafts of another drafter, accepted by random numbers.

    Args:
        drafter: Drafter that runs; where it has fewer drafts than are wanted, random tokens replace them.
        rates: Probability of each draft of a step that it is accepted, and all before it; none is above the one before.
        drafts_always: Whether to draft in every step, not only where that pays.
    """

    def __init__(
        self,
        drafter: Drafter,
        rates: Sequence[float],
        vocab_size: int,
        device: torch.device,
        drafts_always: bool = False,
    ) -> None:
        super().__init__(drafter.num_speculative_tokens)
        self.drafts_always, self.reads_tokens, self.synthetic_rates = drafts_always, drafter.reads_tokens, tuple(rates)
        self._drafter = drafter
        self._rng = random.Random(0)  # the same on all ranks
        rng = torch.Generator().manual_seed(0)
        self._ones = torch.ones(MAX_DRAFT_ROWS, dtype=torch.int64, device=device)
        # After accepted drafts; the token after the last draft counts as none.
        shares = [rate / before if before else 0.0 for before, rate in pairwise((1.0, *rates))]
        self._shares = torch.tensor([*shares, 0.0], device=device)
        self._uniform = torch.rand(_NUM_RANDOM, generator=rng).to(device)
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
        last = len(self.synthetic_rates)
        (places,) = upload_once((tuple(place for num in nums for place in (*range(num), last)),), sampled.device)
        is_right = self._draw(self._uniform, len(sampled)) < self._shares[places]
        return Compared(self._ones[: len(drafts)], is_right.long())

    def follow(self, by: StepGraph | StepMetadata) -> None:
        """Run what the other runs (`Drafter.follow`)."""
        self._drafter.follow(by)

    def complete(self, step: InFlightStep) -> None:
        """Write what the other caches (`Drafter.complete`)."""
        self._drafter.complete(step)

    def close(self) -> None:
        """Free the other's memory."""
        self._drafter.close()

    def _draw(self, numbers: Tensor, count: int) -> Tensor:
        start = self._rng.randrange(_NUM_RANDOM // 2)
        return numbers[start : start + count]
