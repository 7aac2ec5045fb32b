"""Speculation: which requests draft, in which steps, and what becomes of their drafts."""

from collections.abc import Callable, Sequence

from torch import Tensor

from dcpmla.runtime.acceptance import MAX_DRAFT_ROWS, Payoff, StepTime
from dcpmla.runtime.agreement import Message
from dcpmla.runtime.batch import Batch, Piece
from dcpmla.runtime.drafts import NO_DRAFT, Drafter
from dcpmla.runtime.in_flight import InFlightStep
from dcpmla.runtime.request import Request
from dcpmla.runtime.verification import Verified, verify
from dcpmla.upload import upload


class Speculation:
    """The engine's part of speculative decoding.

    Args:
        drafter: Source of drafts.

    Attributes:
        step_time: of the last step, if it was one of decodes and its time says what such steps take.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.step_time: StepTime | None = None
        self._payoff = Payoff()
        self._last_kind: tuple[int, bool] | None = None  # of the step before: decodes, and whether with drafts

    def waits_for(self, pending: InFlightStep, running: Sequence[Request], can_move: Callable[[], bool]) -> bool:
        """Tell whether the next step needs the tokens of the one under way on the host.

        Args:
            can_move: tells whether the next step can be laid out for all tokens that there may be, and moved back on
                the device.
        """
        if self.drafter.reads_tokens:
            return pending.num_drafts > 0 or self.num_wanted(running) > 0
        return pending.num_drafts > 0 and not can_move()

    def num_wanted(self, running: Sequence[Request], is_ahead: bool = False) -> int:
        """Return how many drafts the next step has for each request that can draft.

        Args:
            is_ahead: it is launched before the tokens of the one under way are on the host.
        """
        if is_ahead and self.drafter.reads_tokens:
            return 0
        num_drafts, can_draft = self.drafter.num_speculative_tokens, [each for each in running if each.can_draft]
        if len(running) * (1 + num_drafts) > MAX_DRAFT_ROWS or not can_draft:
            return 0
        drafting = self.drafter.candidates(can_draft)
        if not drafting:
            return 0
        outcomes = [request.acceptance for request in drafting]
        return num_drafts if self.drafter.drafts_always or self._payoff.pays(outcomes, len(running), num_drafts) else 0

    def draft(self, batch: Batch, previous: InFlightStep | None) -> Tensor | None:
        """Give a step the drafts that there are; return these (`Drafts.token_ids`), None for none.

        Args:
            previous: the step before, under way or not.
        """
        drafts = self.drafter.draft([(piece.request, piece.num_drafts) for piece in batch.pieces], previous)
        for index, num_drafts in enumerate(drafts.nums):
            batch.set_drafts(index, num_drafts)
        if not batch.has_prompts:
            self._payoff.count_step(batch.most_drafts > 0)
        return drafts.token_ids if len(drafts.token_ids) else None

    def verify(self, drafts: Tensor | None, ready: Sequence[Piece], message: Message) -> Verified | None:
        """Return, on the device, what becomes of a step's drafts; None where it has none.

        Args:
            ready: pieces of the requests with new tokens.
            message: with the tokens sampled, before each of their drafts, and after the last; and with room for a
                report (`verify`).
        """
        if drafts is None:
            return None
        if drafts.is_cpu:
            (drafts,) = upload([drafts.numpy()], message.memory.device)
        nums = [piece.num_drafts for piece in ready]
        compared = self.drafter.compared(drafts, message.tokens, nums)
        return verify(drafts, message.tokens, nums, compared, message.memory[len(message.words) :])

    def accept(self, piece: Piece, drafts: Sequence[int], num_accepted: int) -> int:
        """Count a request's drafts, those accepted as computed; return how many there were. What the others left in the
        cache will be written over.
        """
        request, num_drafts = piece.request, sum(draft != NO_DRAFT for draft in drafts)
        if num_drafts:
            request.acceptance.count(num_drafts, num_accepted)
            self._payoff.count(num_drafts, num_accepted)
        if drafts:
            request.keep_draws(num_accepted + 1)
        if request.block_ids:  # else it has given way, and is computed anew
            request.num_computed_tokens += num_accepted
        return num_drafts

    def end(self, pending: InFlightStep, seconds: float) -> None:
        """Take the seconds from the end of the step before to that of a step.

        Of steps without drafts those alone say what such steps take that follow one like them.
        """
        kind = None if pending.is_prefill else (len(pending.pieces), pending.num_drafts > 0)
        self.step_time = None
        if kind is not None and (kind[1] or kind == self._last_kind):
            self.step_time = StepTime(*kind, seconds)
        self._last_kind = kind

    def learn(self, step_time: StepTime | None) -> None:
        """Take the time of a step, the same on all ranks."""
        if step_time is not None:
            self._payoff.learn(step_time)

    def close(self) -> None:
        """Free what the drafter holds."""
        self.drafter.close()
