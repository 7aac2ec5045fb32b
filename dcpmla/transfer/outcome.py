"""A transfer on one rank: its end, which the engine reads (`Outcome`), and its rows (`Transfer`)."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

from dcpmla.transfer.moves import Moves, SideStream


class Outcome:
    """A transfer's end, which one of two threads decides, and the first one does.

    Args:
        stream: Stream of gathers or scatters.
        wake: Function that wakes the thread that moves.
    Attributes:
        name: Name of the handoff.
        engine: Name of the other job; "" while it is not known.
        moves: Its gathers or scatters.
        is_done: Whether it has ended: no gather or scatter of it runs.
        has_failed: Whether it has ended without its content; final once `is_done`.
        reason: Sentence on the failure, or "".
        num_bytes: Bytes that were moved so far.
        seconds: Time from the opening to the end, once `is_done`; 0 if it was never opened.
    """

    def __init__(self, name: str, engine: str, stream: SideStream, wake: Callable[[], None]) -> None:
        self.name, self.engine, self.moves = name, engine, Moves(stream)
        self._stream, self._wake = stream, wake
        self.is_done = self.has_failed = False
        self.reason, self.num_bytes, self.seconds = "", 0, 0.0
        self._opened_at: float | None = None
        self._lock = Lock()

    def note_opening(self) -> None:
        """Start to count the time, once."""
        if self._opened_at is None:
            self._opened_at = time.monotonic()

    def end(self, reason: str = "") -> None:
        """End it, with a reason if it has failed. Later ends count for nothing."""
        with self._lock:
            if self.is_done:
                return
            if self._opened_at is not None:
                self.seconds = time.monotonic() - self._opened_at
            self.has_failed, self.reason = bool(reason), reason
            self.is_done = True

    def cancel(self) -> None:
        """End it: later work on the current stream may overwrite the blocks and the state."""
        self.moves.stop()
        self.end("it was cancelled here")
        self._wake()


OutcomeT = TypeVar("OutcomeT", bound=Outcome)


class Transfer(ABC, Generic[OutcomeT]):
    """An open transfer, in the thread that moves its rows.

    Args:
        outcome: Its end, for the engine's thread.
        key: Key among the open transfers of a rank.
    """

    def __init__(self, outcome: OutcomeT, key: Hashable) -> None:
        self.outcome, self.key = outcome, key

    @property
    @abstractmethod
    def is_complete(self) -> bool:
        """Return whether all of it has moved."""
