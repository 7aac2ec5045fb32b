"""An HTTP process over threads that play the ranks, also a model that follows a script, and raw requests to it."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx2
import psutil

from dcpmla.runtime.request import Request, TokenLogprobs
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
    unpack_tokens,
)
from dcpmla.serving.settings import Settings
from tests.support.ranks import start_process
from tests.support.servers import KEY, wait_until_healthy
from tests.support.waiting import LATE

# First tokens of prompts, which are answered each in its own way.
AT_ONCE, NEVER, LONG, SLOW, ENDLESS = range(5)
LONG_TEXT = "x" * (8 << 20)
Answer = Callable[[Submit, int], Iterator[Output]]
Script = Callable[[str], str]  # prompt -> answer, without its end


def by_first_token(submit: Submit, request_id: int) -> Iterator[Output]:
    """Yield the outputs of a request as the first token of its prompt tells."""
    kind = unpack_tokens(submit.prompt)[0]
    texts = {AT_ONCE: ["a"], LONG: [LONG_TEXT], SLOW: ["a"] * 16, ENDLESS: ["x" * 10_000] * 5000}.get(kind, [])
    for number, text in enumerate(texts):
        time.sleep({SLOW: 0.3, ENDLESS: 0.005}.get(kind, 0))
        yield Output(request_id, text, (1,), (), "stop" if number == len(texts) - 1 else None)


class FakeRanks:
    """An HTTP process, and threads that play its ranks.

    Args:
        answer: Function that yields the outputs of a choice of a prompt, in a thread of its own.
        started: What the ranks send once the model is loaded; its directory has the tokenizer.
    """

    def __init__(self, answer: Answer, started: Started, settings: Settings, limits: Limits | None = None) -> None:
        self._answer = answer
        self._socket, theirs = socket.socketpair()
        listener = listen("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = start_process(serve_http, (theirs, listener, settings, limits or Limits()))
        theirs.close()
        listener.close()
        self.submitted: list[Submit] = []
        self.open: set[int] = set()  # Ids of requests that are neither answered nor aborted.
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._send(Opened(started.directory), started)
        for work in (self._read, self._report):
            threading.Thread(target=work, daemon=True).start()
        wait_until_healthy(self.url, LATE, self.process.is_alive)

    def close(self) -> None:
        """End the HTTP process."""
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
                            self.submitted.append(message)
                            self.open |= {*message.request_ids}
                            for each in message.request_ids:
                                threading.Thread(target=self._send_answer, args=(message, each), daemon=True).start()
                        case Abort():
                            self.open -= {*message.request_ids}
                        case Close():
                            return

    def _send_answer(self, submit: Submit, request_id: int) -> None:
        with suppress(OSError):
            for output in self._answer(submit, request_id):
                if request_id not in self.open:
                    return
                self._send(Report([output], self._num_bytes, 0, 0, 0.0, {}))
                if output.finish_reason:
                    self.open.discard(request_id)

    def _report(self) -> None:
        with suppress(OSError):
            while True:
                self._send(Report([], self._num_bytes, 0, 0, 0.0, {}))
                time.sleep(0.5)


class RunningScript(FakeRanks):
    """A server whose model follows a script, so that clients' conversations have exact results.

    Args:
        tokenizer: Tokenizer, which the server reads from a directory.
        is_mute: Whether requests get no answer.
        settings: Settings of the server that differ from those of all scripts.
    Attributes:
        step: Number of tokens of an output.
    """

    def __init__(
        self, tokenizer: Any, script: Script, directory: object, is_mute: bool = False, **settings: Any
    ) -> None:
        self.tokenizer, self._script, self._is_mute, self.step = tokenizer, script, is_mute, 1
        self._eos = frozenset([tokenizer.eos_token_id])
        tokenizer.save_pretrained(directory)
        started = Started(str(directory), len(tokenizer), 100_000, 4, 100_000, "scripted", eos_token_ids=[*self._eos])
        options = {"name": "scripted", "api_key": KEY, "request_timeout": 60, "max_waiting": 16, "drain_seconds": 1}
        super().__init__(self._follow, started, Settings(**{**options, **settings}))

    @property
    def latest(self) -> Submit:
        """Return the latest prompt that has come."""
        return self.submitted[-1]

    @property
    def prompt(self) -> str:
        """Return the text of the latest prompt that has come."""
        return str(self.tokenizer.decode(unpack_tokens(self.latest.prompt).tolist()))

    def num_tokens(self, text: str) -> int:
        return len(self.tokenizer.encode(text))

    def _follow(self, submit: Submit, request_id: int) -> Iterator[Output]:
        prompt = unpack_tokens(submit.prompt).tolist()
        request, num_sent = Request(prompt, submit.params), 0
        text = self._script(self.tokenizer.decode(prompt))
        tokens = self.tokenizer.encode(text, add_special_tokens=False) + [*self._eos]
        for token in () if self._is_mute else tokens:
            request.append(token, self._eos)
            if request.finish_reason or len(request.token_ids) - num_sent >= self.step:
                new = tuple(request.token_ids[num_sent:])
                logprobs = tuple(TokenLogprobs(each, -0.5, ((each, -0.5),)) for each in new)
                if submit.params.logprobs is None:
                    logprobs = ()
                yield Output(request_id, "", new, logprobs, request.finish_reason)
                num_sent = len(request.token_ids)
            if request.finish_reason:
                return


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
