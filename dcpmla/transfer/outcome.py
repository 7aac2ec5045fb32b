"""The end of a transfer on one rank (`Outcome`)."""

import time
from threading import Lock

from dcpmla.transfer.moves import Moves, SideStream

CANCELLED = "it was cancelled here"


class Outcome:
    """A transfer's end, which one of two threads decides, and the first one does.

    Attributes:
        name: Name of the handoff.
        moves: Its gathers or scatters.
        is_done: Whether it has ended: no gather or scatter of it runs.
        has_failed: Whether it has ended without its content; final once `is_done`.
        reason: Sentence on the failure, or "".
        num_bytes: Bytes that were moved so far.
        seconds: Time from the opening to the end, once `is_done`; 0 if it was never opened.
    """

    def __init__(self, name: str, stream: SideStream) -> None:
        self.name, self.moves, self._stream = name, Moves(stream), stream
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
