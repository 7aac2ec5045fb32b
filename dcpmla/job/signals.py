"""SIGTERM and SIGINT, read by a thread while the main thread is in native code."""

import signal
import socket

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """The signals that ask a process to stop, from its construction, in the main thread, until `close`.

    Args:
        timeout: Seconds that `read` waits.
    """

    def __init__(self, timeout: float) -> None:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._reader.settimeout(timeout)
        # Python's handlers wait for the main thread, which may be in a collective; the C handler writes at once.
        self._old_wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._old_handlers = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}

    def read(self) -> list[int]:
        """Wait for signals, and return their numbers; an empty list after the timeout or `interrupt`."""
        try:
            return [number for number in self._reader.recv(64) if number in _SIGNALS]
        except TimeoutError:
            return []

    def interrupt(self) -> None:
        """End a `read` of another thread."""
        self._writer.send(bytes(1))  # the number of no signal

    def close(self) -> None:
        """Restore the handlers of before."""
        signal.set_wakeup_fd(self._old_wakeup)
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self._reader.close()
        self._writer.close()
