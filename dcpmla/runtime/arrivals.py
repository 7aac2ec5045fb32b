"""Requests whose time has not come."""

import heapq
import math
from collections.abc import Iterator

from dcpmla.runtime.request import Request

NOW = -math.inf  # arrival time of a request that arrives at the next step


class Arrivals:
    """Requests that are not yet due, by arrival time, then in the order in which they were added."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next_time(self) -> float:
        """Return the arrival time of the first request."""
        return self._heap[0][0]

    def add(self, request: Request) -> None:
        """Add a request that arrives at its arrival_time."""
        heapq.heappush(self._heap, (request.arrival_time, self._num_added, request))
        self._num_added += 1

    def remove(self, request: Request) -> bool:
        """Remove a request, and return whether it was here."""
        others = [entry for entry in self._heap if entry[2] is not request]
        is_here = len(others) < len(self._heap)
        if is_here:
            self._heap = others
            heapq.heapify(self._heap)
        return is_here

    def take(self, now: float) -> Iterator[Request]:
        """Yield and remove the requests that are due, in order."""
        while self._heap and self.next_time <= now:
            _, _, request = heapq.heappop(self._heap)
            if request.arrival_time == NOW:
                request.arrival_time = now
            yield request
