"""A thread that polls a transport while the engine runs (`Worker`)."""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Thread
from typing import NamedTuple

import torch

# A poll takes Python's lock from the engine's thread, and a pause leaves it there. Beside polls with pauses of 20 us an
# engine of Python alone kept 66 % of its speed, with 200 us 88 %, with 2 ms 98 %, and without a pause 25 to 50 %.
_SHORTEST, _MOVING, _IDLE = 2e-5, 2e-4, 2e-3  # seconds
_WAITED = 64  # A pause is this part of the time since the last news, so no answer waits for more than 2 % longer.
_PAUSE = 0.1  # seconds after an error
_logger = logging.getLogger(__name__)


class Found(NamedTuple):
    """Findings of a poll.

    Attributes:
        has_news: Whether there were calls or messages.
        is_moving: Whether rows are on their way, which may need polls to go on.
    """

    has_news: bool
    is_moving: bool


def pause_after(waited: float, is_moving: bool) -> float:
    """Return the seconds between two polls, the last news being `waited` seconds old (`Found`)."""
    return min(max(_SHORTEST, waited / _WAITED), _MOVING if is_moving else _IDLE)


class Worker:
    """A thread that polls until it is closed. An error of a poll fails the transfers, and the thread goes on.

    Args:
        name: Name of the thread.
        device: Device of its work.
        poll: Function that does what can be done now.
        fail: Function that ends all transfers for a reason.
    """

    def __init__(self, name: str, device: torch.device, poll: Callable[[], Found], fail: Callable[[str], None]) -> None:
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
        is_last, news_at = False, time.monotonic()
        while not is_last:
            is_last = self._is_closed
            try:
                has_news, is_moving = self._poll()
                now = time.monotonic()
                news_at = now if has_news else news_at
                pause = pause_after(now - news_at, is_moving)
            except Exception as error:
                pause = _PAUSE
                reason = f"{type(error).__name__}: {error}"
                if reason not in logged:
                    logged.add(reason)
                    _logger.exception("transfers between servers fail; further errors of this kind are not logged")
                with suppress(Exception):  # it sends messages, which may be what fails
                    self._fail(reason)
            if is_last:
                return
            if pause <= _MOVING:
                time.sleep(pause)  # a wait for the event takes the lock for longer than the poll does
            else:
                self._wake.wait(pause)
            self._wake.clear()
