"""The first rank's end of the HTTP process: its start and end, and two threads that move messages.

Neither side waits for the other: a thread sends the engine's messages, another one queues the process's commands, and
the engine reads that queue once a step. The process limits the bytes of commands (`Outbox`).
"""

import errno
import os
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import NoReturn

from dcpmla.serving.forks import fork
from dcpmla.serving.messages import LENGTH, Message, pack

SILENCE = 60  # seconds without a byte from the process, after which it counts as stuck
_FAREWELL = 10.0  # seconds that the process has for its last answers, after the ranks have stopped
_PORT_WAIT = 15.0  # seconds that an earlier run may take to close the port
_LAST_SECONDS = 15.0  # time for its last answers after the first rank's end; a busy host needs more than a few
_READ_BYTES = 1 << 20


class Frontend:
    """A process of this one, below a guard that ends it after this one is gone, and the connection to it.

    Both are forked, so a frontend must be made before this process starts threads or touches a GPU; in return the
    process starts at once and shares the imported modules.

    Args:
        main: Function of the process, which gets its end of the connection.
        listener: The process's listening socket.
    """

    def __init__(self, main: Callable[[socket.socket], object], listener: socket.socket) -> None:
        self._socket, theirs = socket.socketpair()
        guards_end, self._lifeline = os.pipe()  # ends with this process: no other holds the writing end

        def run() -> None:
            self._socket.close()  # otherwise the process would not notice this one's end
            os.close(self._lifeline)
            _guard(partial(main, theirs), (theirs, listener), guards_end)

        self._pid = fork(run)
        self._process = os.pidfd_open(self._pid)
        theirs.close()
        os.close(guards_end)
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._inbox: SimpleQueue[bytes | None] = SimpleQueue()  # None is the end
        self._next: list[bytes | None] = []  # taken from the inbox while the engine was idle
        self._silence = ""  # words on a process that is silent
        self.num_taken = 0  # bytes of commands

    def start(self) -> None:
        """Start the threads; from now on the process must not be silent."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", SILENCE, 0))
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, message: Message) -> None:
        """Queue a message."""
        self._outbox.put(pack(message))

    def wait(self, seconds: float) -> None:
        """Wait for a command, at most for some seconds."""
        if not self._next:
            with suppress(Empty):
                self._next.append(self._inbox.get(timeout=seconds))

    def take(self) -> bytes:
        """Return the packed commands that have come since the last call.

        Raises:
            RuntimeError: The process has ended, or is stuck.
        """
        packed, self._next = self._next, []
        with suppress(Empty):
            while True:
                packed.append(self._inbox.get_nowait())
        if None in packed:
            raise RuntimeError(f"the HTTP process {self._silence or self._end()}")
        commands = b"".join(command for command in packed if command is not None)
        self.num_taken += len(commands)
        return commands

    def close(self) -> None:
        """Let the process send its last answers, and wait for its end."""
        self._outbox.put(None)
        self._writer.join(_FAREWELL)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        self._await_end()
        os.close(self._lifeline)
        os.close(self._process)

    def _end(self) -> str:
        """Describe the end of the process, whose end of the socket is closed."""
        code = self._await_end() or 0
        if code > 128:
            return f"was killed by {signal.Signals(code - 128).name}, by hand or for want of memory"
        return "has ended: see its lines above"

    def _await_end(self) -> int | None:
        """Wait a while for the guard's end, and return its exit code; None if it still runs, or was waited for."""
        with suppress(ChildProcessError):
            if select.select([self._process], [], [], _FAREWELL)[0]:
                code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
                return code if code >= 0 else 128 - code
        return None

    def _write(self) -> None:
        with suppress(OSError):  # the reader notices the end, too
            while (message := self._outbox.get()) is not None:
                self._socket.sendall(message)

    def _read(self) -> None:
        try:
            while True:
                head = self._receive(LENGTH.size)
                (length,) = LENGTH.unpack(head)
                if length:  # otherwise it is a BEAT
                    self._inbox.put(head + self._receive(length))
        except BlockingIOError:
            self._silence = f"was silent for {SILENCE} s: it is stopped or stuck"
        except (OSError, EOFError):
            pass
        finally:
            self._inbox.put(None)

    def _receive(self, num_bytes: int) -> bytes:
        """Return the next bytes.

        Raises:
            BlockingIOError: None came for SILENCE seconds.
            EOFError: The process has closed its end.
        """
        received = bytearray()
        while len(received) < num_bytes:
            part = self._socket.recv(min(num_bytes - len(received), _READ_BYTES))
            if not part:
                raise EOFError
            received += part
        return bytes(received)


def _guard(main: Callable[[], object], sockets: Sequence[socket.socket], owner: int) -> NoReturn:
    """Run a function in a child process and end as it does, with the exit code 128 + n for signal n.

    The child is killed a while after the first rank's end: if it were stopped or stuck, it would keep the port, and no
    restarted job could listen there.

    Args:
        main: Function of the child.
        sockets: The child's sockets, which this process closes.
        owner: Reading end of a pipe that ends with the first rank, the only holder of its writing end.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # Launchers send them to all processes; the ranks decide.
    pid = fork(main)
    child = os.pidfd_open(pid)
    for each in sockets:
        each.close()
    ended, _, _ = select.select([child, owner], [], [])
    if child not in ended and not select.select([child], [], [], _LAST_SECONDS)[0]:
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os._exit(code if code >= 0 else 128 - code)


def listen(host: str, port: int) -> socket.socket:
    """Open the server's port, which an earlier run may still be closing.

    Raises:
        ValueError: There is no such address, or another program listens there.
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
        # A client whose host has gone is silent: connections inherit that the kernel asks it for an answer.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return listener
