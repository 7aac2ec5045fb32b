"""Bookkeeping of states: which running request has which, and which are remembered with a block."""

from collections import OrderedDict

_REMEMBERED_STATES = 8  # at least, for requests that begin as earlier ones did


def num_states(num_running: int) -> int:
    """Return how many states to have for so many requests that run at the same time, remembered ones among them."""
    return num_running + max(_REMEMBERED_STATES, num_running // 4)


class StatePool:
    """Numbers in [0, num_states), of requests' states in a cache (`dcpmla.attention.compressed.cache`).

    A state that is remembered is the one after a block: a request that begins with the tokens up to there goes on from
    a copy of it. Those remembered longest ago, and not found since, give way to running requests.
    """

    def __init__(self, num_states: int) -> None:
        self.num_states = num_states
        self._free = list(range(num_states - 1, -1, -1))
        self._remembered: OrderedDict[int, int] = OrderedDict()  # the number of a block's content -> its state

    def take(self) -> int | None:
        """Return a state for a request, or None if all belong to running ones."""
        if not self._free and self._remembered:
            self._free.append(self._remembered.popitem(last=False)[1])
        return self._free.pop() if self._free else None

    def free(self, state: int) -> None:
        """Take a request's state back."""
        self._free.append(state)

    def remember(self, content: int) -> int | None:
        """Return where to copy the state after a block, whose content has this number; None if it is there already, or
        nothing is free.
        """
        if content in self._remembered:
            return None
        state = self.take()
        if state is not None:
            self._remembered[content] = state
        return state

    def find(self, content: int) -> int | None:
        """Return the state after a block, or None."""
        if content not in self._remembered:
            return None
        self._remembered.move_to_end(content)
        return self._remembered[content]

    def forget(self, content: int) -> None:
        """Free the state after a block whose content nobody can find any more."""
        if content in self._remembered:
            self._free.append(self._remembered.pop(content))
