"""A thread that polls a transport while the engine runs (`Worker`)."""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Thread

import torch

# Polls take Python's lock from the engine's thread, so they are rare while transfers wait.
_BUSY, _IDLE = 2e-4, 2e-3  # seconds between two polls
_GRACE = 0.01  # seconds of frequent polls after the last one that found work
_PAUSE = 0.1  # seconds after an error
_logger = logging.getLogger(__name__)


class Worker:
    """A thread that polls until it is closed. An error of a poll fails the transfers, and the thread goes on.

    Args:
        name: Name of the thread.
        device: Device of its work.
        poll: Function that returns whether it found work, or work goes on.
        fail: Function that ends all transfers for a reason.
    """

    def __init__(self, name: str, device: torch.device, poll: Callable[[], bool], fail: Callable[[str], None]) -> None:
        self._device, self._poll, self._fail = device, poll, fail
        self._wake, self._is_closed = Event(), False
        # A process that fails ends without a wait for other jobs, so the thread is a daemon.
        self._thread = Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Let it poll now, from any thread."""
        self._wake.set()

    def close(self) -> None:
        """End the thread after a last poll, and join it."""
        self._is_closed = True
        self._wake.set()
        self._thread.join()

    @torch.inference_mode()  # a program may have made the caches in this mode
    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            torch.cuda.current_stream().query()  # makes the device's context current, which transports need
        logged: set[str] = set()
        is_last, busy_until = False, 0.0
        while not is_last:
            is_last = self._is_closed
            try:
                has_work, now = self._poll(), time.monotonic()
                busy_until = now + _GRACE if has_work else busy_until
                pause = _BUSY if now < busy_until else _IDLE
            except Exception as error:
                pause = _PAUSE
                reason = f"{type(error).__name__}: {error}"
                if reason not in logged:
                    logged.add(reason)
                    _logger.exception("transfers between servers fail; further errors of this kind are not logged")
                with suppress(Exception):  # it sends messages, which may be what fails
                    self._fail(reason)
            if not is_last:
                self._wake.wait(pause)
                self._wake.clear()
