"""The order of waiting requests."""

from collections import deque

from dcpmla.runtime.request import Request
from dcpmla.runtime.reuse import PrefixReuse

_PATIENCE = 120.0  # seconds after which a request is not passed any more
_SHORT_TOKENS = 1024  # tokens of a prompt that is computed as quickly as what a cached one lacks
_MOST = 64  # requests that are looked at in a step


def put_cached_first(waiting: deque[Request], reuse: PrefixReuse, now: float) -> None:
    """Let requests whose prompts are short or mostly in the cache pass the others, for a while.

    More conversations than the cache holds would otherwise evict each other's contexts while they wait: each turn is
    then computed anew from its beginning. In a closed loop of agents past that number, first come, first served finds
    nothing in the cache; so served, most conversations go on and a few wait.

    Requests that have run, and were preempted, stay first. Each other kind is in the order of arrival.

    Args:
        now: Seconds on the first rank's clock, the same on all ranks.
    """

    def place(request: Request) -> tuple[int, float]:
        if request.scheduled_time is not None:
            return 0, 0.0
        if now - request.arrival_time >= _PATIENCE:
            return 1, request.arrival_time
        is_quick = len(request.prompt_token_ids) <= _SHORT_TOKENS or reuse.has_most(request)
        return (2 if is_quick else 3), request.arrival_time

    first = [waiting.popleft() for _ in range(min(len(waiting), _MOST))]
    waiting.extendleft(reversed(sorted(first, key=place)))
