"""Drafts from a recorded run, a chosen share of them right."""

import random
from collections.abc import Mapping, Sequence

from dcpmla.runtime.drafts import Drafter, Drafts
from dcpmla.runtime.in_flight import InFlightStep
from dcpmla.runtime.request import Request


class RecordedDrafter(Drafter):
    """Drafts of requests whose tokens are known from a run without drafts.

    Args:
        token_ids: new tokens of each request, by its id.
        share: of drafts that are right, in [0, 1]; one that follows a wrong one counts as any other.
    """

    drafts_always = True
    reads_tokens = False

    def __init__(
        self,
        num_speculative_tokens: int,
        token_ids: Mapping[str | int, Sequence[int]],
        share: float,
        vocab_size: int,
    ) -> None:
        super().__init__(num_speculative_tokens)
        self._token_ids, self._share, self._vocab_size = token_ids, share, vocab_size
        self._rng = random.Random(0)

    def draft(self, wanted: Sequence[tuple[Request, int]], previous: InFlightStep | None) -> Drafts:
        """Take the recorded tokens, some of them made wrong."""
        return Drafts.of([self._draft(request, num, previous) for request, num in wanted])

    def _draft(self, request: Request, num_wanted: int, previous: InFlightStep | None) -> list[int]:
        start = request.num_new_tokens
        if request.num_in_flight and request.num_tried:  # read from the device, which others would not do
            assert previous is not None
            assert previous.verified is not None
            start += int(previous.verified.num_accepted[previous.rows[request]])
        right = self._token_ids[request.request_id][start : start + num_wanted]
        return [token if self._rng.random() < self._share else (token + 1) % self._vocab_size for token in right]
