"""Order of prompts that wait or run (`Precedence`)."""

from collections import deque
from enum import Enum, auto
from operator import attrgetter

from dcpmla.runtime.request import Request
from dcpmla.runtime.reuse import PrefixReuse

_NUM_ORDERED = 64  # waiting requests that are looked at in a step
_arrival_time = attrgetter("arrival_time")


class Kind(Enum):
    """Kind of a waiting request, by the tokens that it lacks: SOME are less than half of its prompt, MOST are more."""

    PREEMPTED = auto()
    LITTLE = auto()
    SOME = auto()
    MOST = auto()


class Precedence:
    """Lets prompts that lack little go before the others, and leaves these half of the work.

    A prompt lacks *little* if that is at most half of a step's tokens: a short one, or the next turn of a conversation
    that the cache has. Without its precedence it would wait for all of a long prompt. And more conversations than the
    cache holds would evict each other's contexts while they wait, until each turn is computed from its beginning.

    - Running prompts that lack little go first in a step, unless they have had more of the work than the others.
    - A waiting prompt that lacks more is passed by those that lack little, then by those that lack less than half of
      their tokens, until these have had as many tokens computed as it has.

    Requests that have run, and were preempted, stay first. Each other kind is in the order of arrival. All of it
    depends on counts that are the same on all ranks.

    Args:
        reuse: Search for the prompts' blocks.
        max_num_batched_tokens: Limit of a step's tokens.
    """

    def __init__(self, reuse: PrefixReuse, max_num_batched_tokens: int) -> None:
        self._reuse, self._little = reuse, max_num_batched_tokens // 2
        self._ahead_us = 0.0  # work on prompts that lack little less that on the others, since these run
        self._num_passed = 0  # tokens computed of prompts that lack less than half, since one that lacks more waits
        self._others_wait = False

    @property
    def is_little_first(self) -> bool:
        """Return whether prompts that lack little go before running ones that lack more."""
        return self._ahead_us <= 0

    def lacks_little(self, request: Request) -> bool:
        """Return whether a waiting or running request lacks at most half of a step's tokens."""
        least = request.num_tokens - self._little
        return request.num_computed_tokens >= least or (not request.block_ids and self._reuse.has_start(request, least))

    def arrange(self, waiting: deque[Request]) -> int:
        """Order waiting requests; return how many, at the front, may go before running prompts that lack more."""
        kinds: dict[Kind, list[Request]] = {kind: [] for kind in Kind}
        for request in [waiting.popleft() for _ in range(min(len(waiting), _NUM_ORDERED))]:
            kinds[self._kind(request)].append(request)
        for kind in (Kind.LITTLE, Kind.SOME, Kind.MOST):
            kinds[kind].sort(key=_arrival_time)
        heads = [kinds[kind][0] for kind in (Kind.SOME, Kind.MOST) if kinds[kind]]
        due = [request for request in sorted(heads, key=_arrival_time) if self._is_due(request)]
        self._others_wait = bool(waiting or heads)
        first = [*kinds[Kind.PREEMPTED], *due, *kinds[Kind.LITTLE]]
        others = [request for request in kinds[Kind.SOME] + kinds[Kind.MOST] if request not in due]
        waiting.extendleft(reversed(first + others))
        return len(first)

    def admit(self, request: Request) -> None:
        """Take a request that is admitted for the first time. If it was due, or lacks most of its prompt, the count of
        tokens that pass others begins anew.
        """
        if not self.lacks_little(request) and (self._was_missed(request) or self._is_due(request)):
            self._num_passed = 0

    def count(self, request: Request, num_tokens: int, us: float) -> None:
        """Count a piece of a running prompt that this step computes.

        Args:
            us: Modelled microseconds (`PieceCosts.piece_us`).
        """
        self._ahead_us += us if self.lacks_little(request) else -us
        self._num_passed += 0 if self._was_missed(request) else num_tokens

    def settle(self, others_run: bool) -> None:
        """End a step.

        Args:
            others_run: Whether prompts that lack more than little were running at its beginning.
        """
        self._ahead_us = max(0.0, self._ahead_us) if others_run else 0.0
        self._num_passed = self._num_passed if self._others_wait else 0

    def _kind(self, request: Request) -> Kind:
        if request.scheduled_time is not None:
            return Kind.PREEMPTED
        if self.lacks_little(request):
            return Kind.LITTLE
        return Kind.SOME if self._reuse.has_start(request, len(request.prompt_token_ids) // 2 + 1) else Kind.MOST

    def _is_due(self, request: Request) -> bool:
        return self._num_passed >= len(request.prompt_token_ids)

    def _was_missed(self, request: Request) -> bool:
        """Return whether a running request lacked half of its prompt or more, and more than little."""
        num_tokens = len(request.prompt_token_ids)
        return request.num_cached_tokens < min(num_tokens // 2 + 1, num_tokens - self._little)
