"""Requests wait until they are due and their grammars are compiled."""

import math
from bisect import bisect_right, insort
from operator import attrgetter

from dcpmla.runtime.grammars import Grammars
from dcpmla.runtime.request import Request

NOW = -math.inf  # arrival time of a request that arrives at the next step
_arrival_time = attrgetter("arrival_time")


class Arrivals:
    """Requests that the scheduler does not have yet.

    Args:
        grammars: Grammars of requests, which wait for them first.
    """

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._coming: list[Request] = []  # by arrival time, then in the order of `add`

    @property
    def is_empty(self) -> bool:
        """Return whether there are none."""
        return not (self._coming or self._grammars.is_pending)

    @property
    def next_time(self) -> float | None:
        """Return the arrival time of the next request whose grammar is compiled, if it has one; None without any."""
        return self._coming[0].arrival_time if self._coming else None

    def add(self, request: Request) -> None:
        """Add a request."""
        if request.params.grammar is None:
            insort(self._coming, request, key=_arrival_time)
        else:
            self._grammars.add(request)

    def remove(self, request: Request) -> bool:
        """Remove a request that is to end; return whether it was here."""
        if request in self._coming:
            self._coming.remove(request)
            return True
        return self._grammars.holds(request)  # `Grammars.take` leaves ended requests out.

    def take_compiled(self, num_compiled: int) -> None:
        """Take the requests whose grammars the first rank has compiled, num_compiled in all."""
        for request in self._grammars.take(num_compiled):
            insort(self._coming, request, key=_arrival_time)

    def take_due(self, now: float) -> list[Request]:
        """Return the requests that are due, in order, once."""
        num_due = bisect_right(self._coming, now, key=_arrival_time)
        due, self._coming = self._coming[:num_due], self._coming[num_due:]
        for request in due:
            request.arrival_time = now if request.arrival_time == NOW else request.arrival_time
        return due
