"""An HTTP process with short limits, over a thread in place of the ranks, and requests to it."""

import json
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx2
import psutil

from dcpmla.serving.connections import Limits
from dcpmla.serving.frontend import listen
from dcpmla.serving.http import serve_http
from dcpmla.serving.messages import (
    LENGTH,
    Abort,
    Close,
    Message,
    Opened,
    Output,
    Report,
    Started,
    Stopped,
    Submit,
    pack,
    unpack_commands,
)
from dcpmla.serving.settings import Settings
from tests.support.ranks import start_process
from tests.support.servers import KEY

AUTHORIZED = {"Authorization": f"Bearer {KEY}"}
LIMITS = Limits(head_seconds=2, body_seconds=6, send_seconds=2, total_bytes=24 << 20)
MEMORY = 150 << 20  # bytes that a test may add to the process
LATE = 60  # seconds after which a test fails
# First tokens of prompts that the engine answers in its own way.
AT_ONCE, NEVER, LONG, SLOW, ENDLESS = range(5)
LONG_TEXT = "x" * (8 << 20)


class FakeEngine:
    """An HTTP process with short limits, and a thread that plays the ranks."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        listener = listen("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        settings = Settings(name="model", api_key=KEY, request_timeout=30, max_waiting=4, drain_seconds=1)
        self.process = start_process(serve_http, (theirs, listener, settings, LIMITS))
        theirs.close()
        listener.close()
        self.open: dict[int, int] = {}  # Kinds of prompts by request id.
        self.num_submitted = 0
        self._num_bytes = 0
        self._lock = threading.Lock()
        with tempfile.TemporaryDirectory() as directory:
            self._send(Opened(directory), Started(directory, 1000, 10_000, 4, 20_000))
            wait_until(self.is_healthy, "the server does not start")
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._report, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._send(Stopped())
        self.process.join(10)
        self.process.kill()
        self.process.join()

    def connect(self, data: bytes = b"", buffer: int | None = None) -> socket.socket:
        connection = socket.socket()
        if buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        connection.settimeout(LATE)
        connection.connect(("127.0.0.1", self.port))
        connection.sendall(data)
        return connection

    def memory(self) -> int:
        return psutil.Process(self.process.pid).memory_info().rss

    def num_connections(self) -> int:
        states = psutil.CONN_ESTABLISHED, psutil.CONN_CLOSE_WAIT
        connections = psutil.Process(self.process.pid).net_connections("tcp")
        return sum(connection.status in states for connection in connections)

    def is_healthy(self) -> bool:
        return httpx2.get(f"{self.url}/health", timeout=LATE).status_code == 200

    def _send(self, *messages: Message) -> None:
        with self._lock:
            self._socket.sendall(b"".join(map(pack, messages)))

    def _read(self) -> None:
        with suppress(OSError), self._socket.makefile("rb") as stream:
            while head := stream.read(LENGTH.size):
                body = stream.read(LENGTH.unpack(head)[0])
                for message in unpack_commands(head + body) if body else ():
                    self._num_bytes += len(head + body)
                    match message:
                        case Submit():
                            for request_id in message.request_ids:
                                self.open[request_id] = message.prompt_token_ids[0]
                                self.num_submitted += 1
                                threading.Thread(target=self._answer, args=(request_id,), daemon=True).start()
                        case Abort():
                            for request_id in message.request_ids:
                                self.open.pop(request_id, None)
                        case Close():
                            return

    def _answer(self, request_id: int) -> None:
        kind = self.open[request_id]
        texts = {AT_ONCE: ["a"], LONG: [LONG_TEXT], SLOW: ["a"] * 16, ENDLESS: ["x" * 10_000] * 5000}.get(kind, [])
        with suppress(OSError):
            for number, text in enumerate(texts):
                time.sleep({SLOW: 0.5, ENDLESS: 0.005}.get(kind, 0))
                reason = "stop" if number == len(texts) - 1 else None
                if request_id not in self.open:
                    return
                self._send(Report([Output(request_id, text, (1,), (), reason)], self._num_bytes, 0, 0, 0.0, {}))
            if texts:
                self.open.pop(request_id, None)

    def _report(self) -> None:
        with suppress(OSError):
            while True:
                self._send(Report([], self._num_bytes, 0, 0, 0.0, {}))
                time.sleep(0.5)


def head(length: int | None, path: str = "/v1/completions", key: str = KEY) -> bytes:
    framing = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n{framing}\r\n\r\n".encode()


def request(kind: int, **fields: Any) -> bytes:
    body = json.dumps({"prompt": [kind], **fields}).encode()
    return head(len(body)) + body


def is_closed(connection: socket.socket) -> bool:
    """Read to the end of a connection."""
    with suppress(ConnectionError):
        while connection.recv(1 << 16):
            pass
    return True


def wait_until(condition: Callable[[], bool], words: str) -> None:
    until = time.monotonic() + LATE
    while not condition():
        assert time.monotonic() < until, words
        time.sleep(0.05)
