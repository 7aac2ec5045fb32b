"""Speculation: which requests draft, in which steps, and what becomes of their drafts."""

from collections.abc import Callable, Sequence

from torch import Tensor

from dcpmla.runtime.drafts import Computed, Drafter
from dcpmla.runtime.pending import PendingStep
from dcpmla.runtime.request import Request
from dcpmla.runtime.scheduler import Piece, Step


class Speculation:
    """The engine's part of speculative decoding.

    A step with drafts is waited for: how many it accepts decides the lengths of the next. Other steps are launched one
    ahead, as long as the drafter has nothing to add.

    Args:
        drafter: None for one token a request and step.
    """

    def __init__(self, drafter: Drafter | None) -> None:
        self.drafter = drafter
        self._computed: list[Computed] = []  # the tokens of the step before

    def waits_for(self, pending: PendingStep, running: Sequence[Request]) -> bool:
        """Tell whether the next step needs the tokens of the one under way: all it accepts, or those drafts follow."""
        return self.drafter is not None and (
            pending.num_drafts > 0 or self.drafter.waits([request for request in running if request.can_draft])
        )

    def num_wanted(self, running: Sequence[Request]) -> Callable[[Request], int] | None:
        """Return what says how many drafts to try of a request; None where there are none."""
        drafter = self.drafter
        if drafter is None:
            return None
        return lambda request: drafter.num_wanted(request, len(running)) if request.can_draft else 0

    def draft(self, step: Step) -> Tensor | None:
        """Give a step's decodes the drafts that there are; return these (`Drafts.token_ids`), None for none."""
        if self.drafter is None:
            return None
        # Who has given way since then is computed anew.
        kept = [part for part in self._computed if part.request.num_computed_tokens == part.position + part.num_tokens]
        self._computed = []
        drafts = self.drafter.draft([(piece.request, piece.num_drafts) for piece in step.pieces], kept)
        for index, num_drafts in enumerate(drafts.nums):
            step.set_drafts(index, num_drafts)
        return drafts.token_ids if len(drafts.token_ids) else None

    def accept(self, piece: Piece, drafts: Sequence[int], sampled: Sequence[int]) -> Sequence[int]:
        """Return a request's new tokens: those sampled up to the first rejected draft. Accepted drafts count as
        computed; what the others left in the cache will be written over.
        """
        request, num_accepted = piece.request, 0
        if self.drafter is not None:
            num_accepted = self.drafter.num_accepted(drafts, sampled)
            request.acceptance.count(len(drafts), num_accepted)
        if drafts:
            request.num_computed_tokens += num_accepted
            request.keep_draws(num_accepted + 1)
        return sampled[: num_accepted + 1]

    def end(self, pending: PendingStep) -> None:
        """Remember what a step has computed, once its requests have its tokens."""
        if self.drafter is not None:
            self._computed = pending.computed()

    def close(self) -> None:
        """Free what the drafter holds."""
        if self.drafter is not None:
            self.drafter.close()
