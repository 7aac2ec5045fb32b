"""Transfers between tiers of memory, whose ends all ranks agree on in the steps' messages (`Progress`)."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

_FIELD_BITS = 9  # a field counts ranks; more than 511 never share a step
_NUM_FIELDS = 7  # in a word of 63 bits
NUM_WORDS = 2  # ranks whose transfers have ended, and ranks whose transfers have failed


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

    A rank's own transfer decides nothing: one ends for all ranks when a message has counted all of them.

    Args:
        num_ranks: Number of ranks that share messages.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._watched: list[Watched] = []

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
        """Return this rank's words for a message, and the transfers that they are about, the oldest ones."""
        reported = self._watched[:_NUM_FIELDS]
        ended = failed = 0
        for index, (transfer, _) in enumerate(reported):
            if transfer.is_done:
                ended |= 1 << _FIELD_BITS * index
                failed |= transfer.has_failed << _FIELD_BITS * index
        return [ended, failed], reported

    def apply(self, words: Sequence[int], reported: Sequence[Watched]) -> None:
        """End the transfers that have ended on all ranks.

        Args:
            words: Words of `report`, summed over the ranks.
            reported: Transfers that they are about.
        """
        for index, watched in enumerate(reported):
            ended, failed = (word >> _FIELD_BITS * index & (1 << _FIELD_BITS) - 1 for word in words)
            if ended == self._num_ranks and watched in self._watched:  # an earlier message may have ended it
                self._watched.remove(watched)
                watched.on_end(not failed)
