"""Bookkeeping of states: the assignment of states to running requests and to remembered blocks."""

from collections import OrderedDict

_REMEMBERED_STATES = 8  # minimum, for requests that share a prefix with earlier ones


def num_states(num_running: int) -> int:
    """Return the number of states, remembered ones included, for num_running concurrent requests."""
    return num_running + max(_REMEMBERED_STATES, num_running // 4)


class StatePool:
    """A pool of state numbers in [0, num_states), for requests in a cache (`dcpmla.attention.compressed.cache`).

    A remembered state is the state after a block: a request that begins with the same tokens continues from a copy of
    it. Running requests evict the least recently used remembered states.
    """

    def __init__(self, num_states: int) -> None:
        self.num_states = num_states
        self._free = list(range(num_states - 1, -1, -1))
        self._remembered: OrderedDict[int, int] = OrderedDict()  # the number of a block's content -> its state

    def take(self) -> int | None:
        """Return a state for a request, or None if running requests hold all states."""
        if not self._free and self._remembered:
            self._free.append(self._remembered.popitem(last=False)[1])
        return self._free.pop() if self._free else None

    def free(self, state: int) -> None:
        """Return a request's state to the pool."""
        self._free.append(state)

    def remember(self, content: int) -> int | None:
        """Return a state for a copy of the state after a block, found by the number of the block's content; None if
        one is remembered already, or none is free.
        """
        if content in self._remembered:
            return None
        state = self.take()
        if state is not None:
            self._remembered[content] = state
        return state

    def find(self, content: int) -> int | None:
        """Return the remembered state after a block, or None."""
        if content not in self._remembered:
            return None
        self._remembered.move_to_end(content)
        return self._remembered[content]

    def forget(self, content: int) -> None:
        """Free the state after a block that has left the prefix cache."""
        if content in self._remembered:
            self._free.append(self._remembered.pop(content))
