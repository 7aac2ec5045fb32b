"""Gathers and scatters on a stream of their own, which the engine's thread can stop (`Moves`)."""

from collections.abc import Callable
from threading import Condition

import torch


class Mark:
    """A point in the work of a stream.

    Args:
        event: Event that was recorded there; None on the CPU, where all work before it has ended.
    """

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self._event = event

    @classmethod
    def of(cls, stream: torch.cuda.Stream | None) -> "Mark":
        """Return a mark after a stream's work so far; None on the CPU."""
        return cls(None if stream is None else stream.record_event())

    @property
    def is_done(self) -> bool:
        """Return whether the work before it has ended."""
        return self._event is None or self._event.query()

    def hold(self, stream: torch.cuda.Stream | None) -> None:
        """Let later work of a stream wait for it."""
        if self._event is not None and stream is not None:
            stream.wait_event(self._event)


class SideStream:
    """The stream of a rank's gathers or scatters; on the CPU they run at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def mark(self) -> Mark:
        """Return a mark of the current stream, in any thread."""
        return Mark.of(self.current)

    @property
    def current(self) -> torch.cuda.Stream | None:
        """Return the current stream of the calling thread; None on the CPU."""
        return None if self._stream is None else torch.cuda.current_stream(self._device)

    def run(self, move: Callable[[], None], after: Mark | None) -> None:
        """Queue work on the stream, after a mark of another one."""
        if self._stream is None:
            move()
            return
        if after is not None:
            after.hold(self._stream)
        with torch.cuda.stream(self._stream):
            move()

    def synchronize(self) -> None:
        """Wait for all work on the stream."""
        if self._stream is not None:
            self._stream.synchronize()

    def end(self) -> Mark:
        """Return a mark of the work that is queued on the stream so far."""
        return Mark.of(self._stream)


class Moves:
    """The gathers or the scatters of one transfer, which one thread runs and the engine's thread stops.

    Attributes:
        generation: Number of stops so far. A move that was planned before a stop does not run after it.
    """

    def __init__(self, stream: SideStream) -> None:
        self._stream, self._lock = stream, Condition()
        self._is_moving = False
        self._last: Mark | None = None
        self.generation = 0

    def run(self, move: Callable[[], None], generation: int, after: Mark | None = None) -> Mark | None:
        """Queue a move; return a mark of its end, or None if it was stopped.

        Args:
            generation: The generation in which the move was planned.
            after: Point in another stream's work that the move waits for.
        """
        with self._lock:
            if generation != self.generation:
                return None
            self._is_moving = True
        try:
            # Without the lock: the engine's thread waits for a move only where it stops them.
            self._stream.run(move, after)
        finally:
            with self._lock:
                self._last, self._is_moving = self._stream.end(), False
                self._lock.notify_all()
        return self._last

    def stop(self) -> None:
        """Stop all moves planned so far, and let the current stream wait for running ones.

        The engine's thread calls it.
        """
        with self._lock:
            self.generation += 1
            while self._is_moving:  # A launch is short.
                self._lock.wait()
        if self._last is not None:
            self._last.hold(self._stream.current)

    @property
    def is_idle(self) -> bool:
        """Return whether no move runs. For the thread that runs them."""
        return self._last is None or self._last.is_done
