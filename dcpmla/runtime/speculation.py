"""Speculation: which requests draft, in which steps, and what becomes of their drafts."""

from collections.abc import Sequence

from torch import Tensor

from dcpmla.runtime.acceptance import MAX_DRAFT_ROWS, Payoff, StepTime
from dcpmla.runtime.drafts import Computed, Drafter
from dcpmla.runtime.pending import PendingStep
from dcpmla.runtime.request import Request
from dcpmla.runtime.scheduler import Piece, Step


class Speculation:
    """The engine's part of speculative decoding.

    A step with drafts is waited for: how many it accepts decides the lengths of the next. Other steps are launched one
    ahead, as long as no drafts are to follow them.

    Args:
        drafter: None for one token a request and step.

    Attributes:
        step_time: of the last step, if it was one of decodes and its time says what such steps take.
    """

    def __init__(self, drafter: Drafter | None) -> None:
        self.drafter = drafter
        self.step_time: StepTime | None = None
        self._payoff = Payoff()
        self._computed: list[Computed] = []  # the tokens of the step before
        self._last_kind: tuple[int, bool] | None = None  # of the step before: decodes, and whether with drafts

    def waits_for(self, pending: PendingStep, running: Sequence[Request]) -> bool:
        """Tell whether the next step needs the tokens of the one under way: all it accepts, or those drafts follow."""
        if self.drafter is None:
            return False
        follows = pending.is_prefill and self.drafter.follows_prompts
        return follows or pending.num_drafts > 0 or self.num_wanted(running) > 0

    def num_wanted(self, running: Sequence[Request]) -> int:
        """Return how many drafts the next step has for each request that can draft."""
        if self.drafter is None:
            return 0
        num_drafts, can_draft = self.drafter.num_speculative_tokens, [each for each in running if each.can_draft]
        if len(running) * (1 + num_drafts) > MAX_DRAFT_ROWS or not can_draft:
            return 0
        drafting = self.drafter.candidates(can_draft)
        if not drafting:
            return 0
        outcomes = [request.acceptance for request in drafting]
        return num_drafts if self.drafter.drafts_always or self._payoff.pays(outcomes, len(running), num_drafts) else 0

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
        if drafts:
            request.acceptance.count(len(drafts), num_accepted)
            self._payoff.count(len(drafts), num_accepted)
            request.num_computed_tokens += num_accepted
            request.keep_draws(num_accepted + 1)
        return sampled[: num_accepted + 1]

    def end(self, pending: PendingStep, seconds: float) -> None:
        """Remember what a step has computed, once its requests have its tokens, and the seconds since the step before.

        Of steps without drafts those alone say what such steps take that follow one like them.
        """
        if self.drafter is None:
            return
        self._computed = pending.computed()
        kind = None if pending.is_prefill else (len(pending.pieces), pending.num_drafts > 0)
        self.step_time = None
        if kind is not None:
            self._payoff.count_step(kind[1])
            if kind[1] or kind == self._last_kind:
                self.step_time = StepTime(*kind, seconds)
        self._last_kind = kind

    def learn(self, step_time: StepTime | None) -> None:
        """Take the time of a step, the same on all ranks."""
        if step_time is not None:
            self._payoff.learn(step_time)

    def close(self) -> None:
        """Free what the drafter holds."""
        if self.drafter is not None:
            self.drafter.close()
