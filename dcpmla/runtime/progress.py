"""Blocks and states on their way between tiers of memory, or from another job, and their ends, on which all ranks agree
in the steps' messages (`Progress`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

_FIELD_BITS = 9  # a field counts ranks; more than 511 never share a step
_NUM_FIELDS = 7  # in a word of 63 bits
# A pair of words counts ranks whose transfers have ended, and ranks whose transfers have failed.
_NUM_PAIRS = 4
NUM_WORDS = 2 * _NUM_PAIRS
_MOST_REPORTED = _NUM_FIELDS * _NUM_PAIRS


class Transfer(Protocol):
    """A copy or a file's transfer under way on this rank."""

    @property
    def is_done(self) -> bool: ...

    @property
    def has_failed(self) -> bool:
        """Return whether it has ended without its content."""


class Watched(NamedTuple):
    """A transfer, and the function of its end."""

    transfer: Transfer
    on_end: Callable[[bool], object]


class Progress:
    """The transfers under way. All ranks watch the same ones, in the same order.

    A transfer ends for all ranks when a message has counted its end on every rank.

    Args:
        num_ranks: Number of ranks that share messages.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._watched: list[Watched] = []
        self._first = 0  # to report next, if there are more than a message has room for

    @property
    def is_empty(self) -> bool:
        """Return whether no transfer is under way."""
        return not self._watched

    def watch(self, transfer: Transfer, on_end: Callable[[bool], object]) -> None:
        """Watch a transfer.

        Args:
            on_end: Function that is called on all ranks at the same step once all of them have ended, with whether
                all have succeeded.
        """
        self._watched.append(Watched(transfer, on_end))

    def reset(self) -> None:
        """Forget all transfers, whose ends no longer matter."""
        self._watched.clear()

    def report(self) -> tuple[list[int], list[Watched]]:
        """Return this rank's words for a message, and the transfers that they are about. Each has its turn: one that
        takes long does not hide the ends of others.
        """
        start = self._first if self._first < len(self._watched) else 0
        reported = self._watched[start : start + _MOST_REPORTED]
        self._first = start + len(reported)
        words = [0] * NUM_WORDS
        for index, (transfer, _) in enumerate(reported):
            if transfer.is_done:
                pair, field = divmod(index, _NUM_FIELDS)
                words[2 * pair] |= 1 << _FIELD_BITS * field
                words[2 * pair + 1] |= transfer.has_failed << _FIELD_BITS * field
        return words, reported

    def apply(self, words: Sequence[int], reported: Sequence[Watched]) -> None:
        """End the transfers that have ended on all ranks.

        Args:
            words: Words of `report`, summed over the ranks.
            reported: Transfers that they are about.
        """
        for index, watched in enumerate(reported):
            pair, field = divmod(index, _NUM_FIELDS)
            ended, failed = (
                word >> _FIELD_BITS * field & (1 << _FIELD_BITS) - 1 for word in words[2 * pair : 2 * pair + 2]
            )
            if ended == self._num_ranks and watched in self._watched:  # an earlier message may have ended it
                self._watched.remove(watched)
                watched.on_end(not failed)


class Stoppable(Protocol):
    """A copy into the cache (`dcpmla.cache.copies.Copy`, `dcpmla.transfer.incoming.Arrival`)."""

    def cancel(self) -> None: ...


@dataclass(eq=False)
class Loading:
    """The content of a prompt that is on its way: from host memory, or from another job, which prefills it.

    Attributes:
        keys: Keys of blocks in host memory.
        blocks: Blocks of the cache that they are copied into.
        state: Key of the state in host memory, and number of the state that it is copied into; None without one.
        can_join: Whether a step may begin before it has ended, and wait for it on the device. The request of a prompt
            that another job prefills is no part of a step until its end.
        copy: Copy of it; None until it is queued, or the other job is known.
        has_ended: Whether all ranks have agreed that it has ended. A prompt's end is that the request forgets it.
    """

    keys: Sequence[bytes] = ()
    blocks: Sequence[int] = ()
    state: tuple[bytes, int] | None = None
    can_join: bool = True
    copy: Stoppable | None = None
    has_ended: bool = False

    def cancel(self) -> None:
        """Drop the parts that are not queued. Later steps write to the blocks after the queued ones."""
        if self.copy is not None:
            self.copy.cancel()
