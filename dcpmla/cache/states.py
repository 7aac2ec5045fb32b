"""Bookkeeping of states: the assignment of states to running requests and to remembered blocks."""

from collections import OrderedDict
from enum import IntEnum

_REMEMBERED_STATES = 8  # minimum, for requests that share a prefix with earlier ones


class Worth(IntEnum):
    """The worth of a remembered state: states of less worth are evicted first."""

    PASSED = 0  # its sequence has a later state
    LATEST = 1  # its sequence has no later state
    SHARED = 2  # sequences part there


def num_states(num_running: int) -> int:
    """Return the number of states, remembered ones included, for num_running concurrent requests."""
    return num_running + max(_REMEMBERED_STATES, num_running // 4)


class StatePool:
    """A pool of state numbers in [0, num_states), for requests in a cache with states.

    A remembered state is the state after a block: a request that begins with the same tokens continues from a copy of
    it. Running requests evict remembered states of the least worth, the least recently used first.
    """

    def __init__(self, num_states: int) -> None:
        self.num_states = num_states
        self._free = list(range(num_states - 1, -1, -1))
        # For each worth the number of a block's content -> its state.
        self._remembered = {worth: OrderedDict[int, int]() for worth in Worth}

    def take(self) -> int | None:
        """Return a state for a request, or None if running requests hold all states."""
        if not self._free:
            self._evict(Worth.SHARED)
        return self._free.pop() if self._free else None

    def free(self, state: int) -> None:
        """Return a request's state to the pool."""
        self._free.append(state)

    def remember(self, content: int, worth: Worth = Worth.LATEST) -> int | None:
        """Return a state for a copy of the state after a block, found by the number of the block's content; None if
        one is remembered already, or all others are worth more. One state of more worth gives way to the latest one.
        """
        known = self._worth_of(content)
        if known is not None:
            self._rank(content, max(known, worth))
            return None
        if not self._free:
            self._evict(Worth.SHARED if worth else worth)
        if not self._free:
            return None
        state = self._free.pop()
        self._remembered[worth][content] = state
        return state

    def find(self, content: int) -> int | None:
        """Return the remembered state after a block, or None. If its sequence has a later state, the sequence that
        finds it parts from that one.
        """
        worth = self._worth_of(content)
        return None if worth is None else self._rank(content, worth or Worth.SHARED)

    def supersede(self, content: int) -> None:
        """Lower the worth of the latest state of a sequence, which has a later one now."""
        if self._worth_of(content) == Worth.LATEST:
            self._rank(content, Worth.PASSED)

    def forget(self, content: int) -> None:
        """Free the state after a block that has left the prefix cache."""
        worth = self._worth_of(content)
        if worth is not None:
            self._free.append(self._remembered[worth].pop(content))

    def __contains__(self, content: int) -> bool:
        return self._worth_of(content) is not None

    def _worth_of(self, content: int) -> Worth | None:
        return next((worth for worth, states in self._remembered.items() if content in states), None)

    def _rank(self, content: int, worth: Worth) -> int:
        """Make a remembered state the most recently used one of a worth, and return it."""
        known = self._worth_of(content)
        assert known is not None
        state = self._remembered[known].pop(content)
        self._remembered[worth][content] = state
        return state

    def _evict(self, highest: Worth) -> None:
        """Free the oldest of the remembered states of the least worth, which is at most `highest`."""
        for worth, states in self._remembered.items():
            if states and worth <= highest:
                self._free.append(states.popitem(last=False)[1])
                return
