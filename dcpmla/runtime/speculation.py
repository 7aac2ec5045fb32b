"""Speculation: the choice of steps and requests that draft, and the outcome of their drafts."""

from collections.abc import Callable, Sequence

from torch import Tensor

from dcpmla.runtime.acceptance import MAX_DRAFT_ROWS, Payoff, StepTime, Verified, verify
from dcpmla.runtime.agreement import Message
from dcpmla.runtime.batch import Batch, Piece
from dcpmla.runtime.drafts import NO_DRAFT, Drafter
from dcpmla.runtime.in_flight import InFlightStep
from dcpmla.runtime.request import Request
from dcpmla.upload import upload


class Speculation:
    """The engine's part of speculative decoding.

    Args:
        drafter: Source of drafts.
        drafts_always: Whether each step drafts for all its requests that can draft.

    Attributes:
        step_time: Time of the last step, if it had decodes alone and its time is representative (`end`).
    """

    def __init__(self, drafter: Drafter, drafts_always: bool = False) -> None:
        self.drafter, self._drafts_always = drafter, drafts_always
        self.step_time: StepTime | None = None
        self._payoff = Payoff()
        self._last_kind: tuple[int, bool] | None = None  # the previous step's number of decodes, and whether it drafted

    def waits_for(self, pending: InFlightStep, running: Sequence[Request], can_move: Callable[[], bool]) -> bool:
        """Return whether the next step needs the tokens of the one under way on the host.

        Args:
            can_move: Function that returns whether the next step can be laid out as if all drafts were accepted, and
                moved back on the device.
        """
        if self.drafter.reads_tokens:
            return pending.num_drafts > 0 or self.num_wanted(running) > 0
        return pending.num_drafts > 0 and not can_move()

    def num_wanted(self, running: Sequence[Request], is_ahead: bool = False) -> int:
        """Return the number of drafts in the next step of each request that can draft.

        Args:
            is_ahead: Whether it is launched before the tokens of the one under way are on the host.
        """
        num_drafts = self.drafter.num_speculative_tokens
        if not num_drafts or (is_ahead and self.drafter.reads_tokens):
            return 0
        if len(running) * (1 + num_drafts) > MAX_DRAFT_ROWS:
            return 0
        can_draft = [each for each in running if each.can_draft]
        if not can_draft or self._drafts_always:
            return num_drafts if can_draft else 0
        drafting = self.drafter.candidates(can_draft)
        if not drafting:
            return 0
        outcomes = [request.acceptance for request in drafting]
        return num_drafts if self.drafter.drafts_always or self._payoff.pays(outcomes, len(running), num_drafts) else 0

    def draft(self, batch: Batch, previous: InFlightStep | None) -> Tensor | None:
        """Add the available drafts to a step; return them (`Drafts.token_ids`), or None without any.

        Args:
            previous: The previous step, under way or not.
        """
        if not self.drafter.num_speculative_tokens:
            return None
        drafts = self.drafter.draft([(piece.request, piece.num_drafts) for piece in batch.pieces], previous)
        for index, num_drafts in enumerate(drafts.nums):
            batch.set_drafts(index, num_drafts)
        if not batch.has_prompts:
            self._payoff.count_step(batch.num_drafts > 0)
        return drafts.token_ids if len(drafts.token_ids) else None

    def verify(self, drafts: Tensor | None, ready: Sequence[Piece], message: Message) -> Verified | None:
        """Return the outcome of a step's drafts, on the device; None for a step without drafts.

        Args:
            ready: Pieces of the requests with new tokens.
            message: Message with the tokens sampled before each draft and after the last, and with room for a report
                (`verify`).
        """
        if drafts is None:
            return None
        if drafts.is_cpu:
            (drafts,) = upload([drafts.numpy()], message.memory.device)
        nums = [piece.num_drafts for piece in ready]
        compared = self.drafter.compared(drafts, message.tokens, nums)
        return verify(drafts, message.tokens, nums, compared, message.memory[len(message.words) :])

    def accept(self, piece: Piece, drafts: Sequence[int], num_accepted: int) -> int:
        """Count a request's drafts, at least one, and return their number; accepted ones count as computed. Cache
        entries of rejected drafts will be overwritten.
        """
        request, num_drafts = piece.request, sum(draft != NO_DRAFT for draft in drafts)
        if num_drafts:
            request.acceptance.count(num_drafts, num_accepted)
            self._payoff.count(num_drafts, num_accepted)
        request.keep_draws(num_accepted + 1)
        if request.block_ids:  # a request without blocks was preempted, and is recomputed
            request.num_computed_tokens += num_accepted
        return num_drafts

    def end(self, pending: InFlightStep, seconds: float, agreed: StepTime | None) -> None:
        """Record the end of a step.

        Time a step without drafts only if the previous step was of the same kind and size.

        Args:
            seconds: Seconds from the end of the previous step to the end of this one, on this rank.
            agreed: Time of an earlier step, the same on all ranks.
        """
        if agreed is not None:
            self._payoff.learn(agreed)
        kind = None if pending.is_prefill else (len(pending.pieces), pending.num_drafts > 0)
        self.step_time = None
        if kind is not None and (kind[1] or kind == self._last_kind):
            self.step_time = StepTime(*kind, seconds)
        self._last_kind = kind
