"""The first rank's end of the HTTP process: its start, and two threads that move messages.

Neither side waits for the other: what the engine has to say is queued for a thread, what the process says is queued by
one, and the engine looks there once a step.
"""

import errno
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import IO

from dcpmla.serving.messages import LENGTH, pack

_FAREWELL = 10.0  # seconds that the process has to send what it holds, after the ranks have stopped
_PORT_WAIT = 15.0  # seconds that an earlier run may take to give the port back


class Frontend:
    """A child process and the connection to it.

    Args:
        main: called with the connection in the child, whose life it is.
        listener: the child's; its address is shown.

    The child is forked, so it must be made before this process starts threads or touches a GPU; in return it is there
    at once and shares what has been imported.
    """

    def __init__(self, main: Callable[[socket.socket], object], listener: socket.socket) -> None:
        host, port, *_ = listener.getsockname()
        self.address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._socket, theirs = socket.socketpair()
        self._pid = os.fork()
        if self._pid == 0:
            self._socket.close()  # else nobody would see its end
            try:
                main(theirs)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        theirs.close()
        self._outbox: SimpleQueue[object] = SimpleQueue()
        self._inbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._next: list[bytes | None] = []  # taken from the inbox while the engine was idle

    def start(self) -> None:
        """Start the threads."""
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, message: object) -> None:
        """Queue a message."""
        self._outbox.put(message)

    def wait(self, seconds: float) -> None:
        """Wait until there is something to take, at most for some seconds."""
        if not self._next:
            with suppress(Empty):
                self._next.append(self._inbox.get(timeout=seconds))

    def take(self) -> bytes:
        """Return the packed commands that have come since the last call.

        Raises:
            RuntimeError: the process has ended.
        """
        packed, self._next = self._next, []
        with suppress(Empty):
            while True:
                packed.append(self._inbox.get_nowait())
        if None in packed:
            raise RuntimeError(f"the HTTP process {self._end()}")
        return b"".join(command for command in packed if command is not None)

    def close(self) -> None:
        """Let the process send what it has, and wait for its end."""
        self._outbox.put(None)
        self._writer.join(_FAREWELL)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        self._await_end()

    def _end(self) -> str:
        """Say how the process ended, whose end of the socket is closed."""
        status = self._await_end()
        if status is not None and os.WIFSIGNALED(status):
            return f"was killed by {signal.Signals(os.WTERMSIG(status)).name}, by hand or for want of memory"
        return "has ended: see its lines above"

    def _await_end(self) -> int | None:
        """Wait a while for the process's end, and return its status; None where it still runs or was waited for."""
        until = time.monotonic() + _FAREWELL
        with suppress(ChildProcessError):
            while time.monotonic() < until:
                pid, status = os.waitpid(self._pid, os.WNOHANG)
                if pid:
                    return status
                time.sleep(0.05)
        return None

    def _write(self) -> None:
        with suppress(OSError):  # the reader tells of it
            while (message := self._outbox.get()) is not None:
                self._socket.sendall(pack(message))

    def _read(self) -> None:
        with suppress(OSError), self._socket.makefile("rb") as stream:
            while packed := _read_packed(stream):
                self._inbox.put(packed)
        self._inbox.put(None)


def _read_packed(stream: IO[bytes]) -> bytes:
    """Return the next message, packed; nothing at the end."""
    head = stream.read(LENGTH.size)
    return head and head + stream.read(LENGTH.unpack(head)[0])


def listen(host: str, port: int) -> socket.socket:
    """Open the server's port, of which an earlier run may still be letting go.

    Raises:
        ValueError: no such address, or somebody else listens there.
    """
    until = time.monotonic() + _PORT_WAIT
    while True:
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listener = socket.create_server(address[:2], family=family, backlog=1024)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and time.monotonic() < until:
                time.sleep(0.1)
                continue
            raise ValueError(f"no server can listen on {host} (--host), port {port} (--port): {error}") from error
        # A client whose host has gone says nothing: connections inherit that the kernel asks for it.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return listener
