"""SIGTERM, SIGINT and SIGTSTP, read by a thread while the main thread is in native code."""

import signal
import socket
import threading

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGTSTP, signal.SIGCONT)


class StopSignals:
    """The signals that ask a process to end, or to pause as Ctrl-Z does, from its construction, in the main thread,
    until `close`.

    Args:
        timeout: Seconds that `read` waits.
    """

    def __init__(self, timeout: float) -> None:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._reader.settimeout(timeout)
        # Python's handlers wait for the main thread, which may be in a collective; the C handler writes at once.
        self._old_wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        pauses = signal.getsignal(signal.SIGTSTP) != signal.SIG_IGN  # a shell without job control ignores Ctrl-Z
        taken = [number for number in _SIGNALS if pauses or number != signal.SIGTSTP]
        self._old_handlers = {number: signal.signal(number, lambda *_: None) for number in taken}

    def read(self) -> list[int]:
        """Wait for signals, and return their numbers; an empty list after the timeout or `interrupt`. A SIGTSTP that a
        SIGCONT has followed counts for nothing.
        """
        numbers = list[int]()
        try:
            received = self._reader.recv(64)
        except TimeoutError:
            return numbers
        for number in received:
            if number == signal.SIGCONT:
                numbers = [each for each in numbers if each != signal.SIGTSTP]
            elif number in _SIGNALS:
                numbers.append(number)
        return numbers

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


def pause() -> None:
    """Stop this process, all of its threads, until it gets SIGCONT."""
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # sent to this thread, it takes effect before the return
