"""Limits of a connection: whatever its state, a client cannot hold it, its memory or the event loop for ever."""

import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx2
import psutil
import pytest

from dcpmla.serving.app import Settings
from dcpmla.serving.connections import Limits
from dcpmla.serving.errors import ApiError
from dcpmla.serving.frontend import listen
from dcpmla.serving.http import serve_http
from dcpmla.serving.messages import (
    LENGTH,
    Abort,
    Close,
    Output,
    Report,
    Started,
    Stopped,
    Submit,
    pack,
    unpack_commands,
)
from dcpmla.serving.protocol import ChatBody, CompletionBody, parse
from tests.support.ranks import start_process

KEY = "sesame"
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
        settings = Settings("model", KEY, 30)
        self.process = start_process(serve_http, (theirs, listener, settings, 4, 1, LIMITS))
        theirs.close()
        listener.close()
        self.open: dict[int, int] = {}  # Kinds of prompts by request id.
        self.num_submitted = 0
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._send(Started(None, "there is none", 1000, 10_000, 4, 20_000))
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

    def _send(self, *messages: object) -> None:
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


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    until = time.monotonic() + LATE
    while time.monotonic() < until and not engine.is_healthy():
        time.sleep(0.1)
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def check(engine: FakeEngine) -> Iterator[None]:
    """Check that memory stays bounded, that no connection and no request is left, and that the server answers."""
    memory = engine.memory()
    yield
    assert engine.is_healthy()
    wait_until(lambda: engine.num_connections() == 0, "connections are left")
    wait_until(lambda: not engine.open, "requests are left")
    assert engine.memory() < memory + MEMORY
    answer = httpx2.post(f"{engine.url}/v1/completions", json={"prompt": [AT_ONCE]}, headers=AUTHORIZED)
    assert answer.json()["choices"][0]["text"] == "a"


def wait_until(condition: Any, words: str) -> None:
    until = time.monotonic() + LATE
    while not condition():
        assert time.monotonic() < until, words
        time.sleep(0.05)


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


def send_until_closed(connection: socket.socket, piece: bytes, most: int, pause: float = 0.0) -> int:
    """Return the number of bytes that were sent until the server closed the connection."""
    num_sent = 0
    with suppress(ConnectionError):
        while num_sent < most:
            connection.sendall(piece)
            num_sent += len(piece)
            time.sleep(pause)
    return num_sent


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (head(None, key="wrong") + b"1\r\nx\r\n0\r\n", b"a: b\r\n"),
        (head(None, key="wrong") + b"1\r\nx\r\n0\r\na: ", b"b"),
        (head(None) + b"1\r\nx\r\n0\r\n", b"a: b\r\n"),
        (head(None), b"1;" + b"x" * 70_000),
        (head(None) + b"1;", b"x"),
        (b"GET /", b"x"),
        (b"GET / HTTP/1.1\r\n", b"a: b\r\n"),
        (b"GET / HTTP/1.1\r\na: ", b"b"),
        (b"", b"\r\n"),
        (b"GET /health HTTP/1.1\r\n\r\n", b"\r\n"),
        (request(NEVER), b"\r\n"),
        (request(NEVER), b"GET /health HTTP/1.1\r\n\r\n"),
        (request(NEVER, stream=True), b"G"),
        (head(1 << 30, key="wrong"), b"x"),
        (head(None, key="wrong") + b"40000000\r\n", b"x"),
        (head(None), b"1\r\nx\r\n"),
    ],
)
def test_endless_bytes(engine: FakeEngine, start: bytes, piece: bytes) -> None:
    connection = engine.connect(start)
    most = 512 << 20
    assert send_until_closed(connection, piece * (32_000 // len(piece) + 1), most) < most
    assert is_closed(connection)


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (b"", b"G"),
        (b"GET /health HTTP/1.1\r\n\r\n", b"G"),
        (b"GET /health HTTP/1.1\r\n\r\n", b"\r\n"),
        (head(1000, key="wrong"), b"x"),
        (head(1000), b"x"),
        (head(None, key="wrong") + b"0\r\na: ", b"x"),
    ],
)
def test_dripping_bytes(engine: FakeEngine, start: bytes, piece: bytes) -> None:
    connection = engine.connect(start)
    seconds = LATE
    assert send_until_closed(connection, piece, int(seconds / 0.1) * len(piece), 0.1) < seconds / 0.1 * len(piece)
    assert is_closed(connection)


@pytest.mark.parametrize("start", [b"", b"GET / HT", head(None) + b"0\r\n"])
def test_silence(engine: FakeEngine, start: bytes) -> None:
    assert is_closed(engine.connect(start))


@pytest.mark.parametrize(
    "data",
    [
        request(LONG),
        request(LONG).replace(b"\r\n", b"\r\nConnection: close\r\n", 1),
        request(LONG, stream=True),
        request(ENDLESS, stream=True),
    ],
)
def test_an_answer_that_is_not_read(engine: FakeEngine, data: bytes) -> None:
    num_before = engine.num_submitted
    connections = [engine.connect(data, buffer=4096) for _ in range(4)]
    wait_until(lambda: engine.num_submitted == num_before + 4, "the requests do not come")
    assert engine.is_healthy()
    wait_until(lambda: engine.num_connections() == 0, "answers are held")
    for connection in connections:
        connection.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_slow_reader_gets_the_whole_answer(engine: FakeEngine, stream: bool) -> None:
    connection = engine.connect(request(LONG, stream=stream), buffer=1 << 18)
    num_read = 0
    while num_read < len(LONG_TEXT):
        part = connection.recv(1 << 20)
        assert part, f"the answer ends after {num_read} bytes"
        num_read += len(part)
        time.sleep(len(part) / (1 << 20))  # 8 s, several times `send_seconds`
    connection.close()


def test_a_slow_stream_and_kept_connections(engine: FakeEngine) -> None:
    """They take longer than any limit but --request-timeout."""
    with httpx2.Client(base_url=engine.url, headers=AUTHORIZED, timeout=LATE) as client:
        body = {"prompt": [SLOW]}
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            lines = [line for line in response.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert sum(len(json.loads(line.removeprefix("data: "))["choices"][0]["text"]) for line in lines[:-1]) == 16
        assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == "a" * 16


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (head(16 << 20, key="wrong"), 401),
        (head(None, key="wrong"), 401),
        (head((16 << 20) + 1), 413),
        (head(100), 408),
    ],
)
def test_an_answer_before_the_body(engine: FakeEngine, data: bytes, status: int) -> None:
    connection = engine.connect(data)
    assert connection.recv(1000).startswith(f"HTTP/1.1 {status}".encode())
    connection.close()


def test_a_full_queue_reads_no_body(engine: FakeEngine) -> None:
    running = [engine.connect(request(NEVER)) for _ in range(8)]
    wait_until(lambda: len(engine.open) == 8, "the requests do not come")
    connection = engine.connect(head(16 << 20))
    assert connection.recv(1000).startswith(b"HTTP/1.1 429")
    for each in [connection, *running]:
        each.close()


@pytest.mark.parametrize(("key", "status"), [("wrong", b"401"), (KEY, b"200")])
def test_a_request_that_expects_100_is_the_last_one(engine: FakeEngine, key: str, status: bytes) -> None:
    """Refused early, its client may still send the body: no byte of it may be taken for another request."""
    body = json.dumps({"prompt": [AT_ONCE]}).encode()
    connection = engine.connect(head(len(body), key=key)[:-2] + b"Expect: 100-continue\r\n\r\n")
    answer = connection.recv(1 << 16)
    if key == KEY:
        assert answer == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        answer = connection.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert b"connection: close" in answer
    assert is_closed(connection)


def test_bodies_have_a_total(engine: FakeEngine) -> None:
    """Two of three stop before their end; the third is refused, and the server keeps nothing once they are gone."""
    data = head(14 << 20) + b" " * (11 << 20)
    connections = [engine.connect(data) for _ in range(2)]
    answer = httpx2.post(f"{engine.url}/v1/completions", content=b" " * (14 << 20), headers=AUTHORIZED, timeout=LATE)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert engine.is_healthy()
    for connection in connections:
        connection.close()
    wait_until(lambda: engine.num_connections() == 0, "connections are left")
    body = json.dumps({"prompt": [AT_ONCE], "user": "x" * (14 << 20)})
    for _ in range(4):
        answer = httpx2.post(f"{engine.url}/v1/completions", content=body, headers=AUTHORIZED, timeout=LATE)
        assert answer.status_code == 200


MESSAGE = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    "content",
    [
        '{"messages": [' + ",".join([json.dumps(MESSAGE)] * 400_000) + "]}",
        '{"messages": [' + ",".join([json.dumps(MESSAGE)] * 20_000) + "]}",
        '{"messages": [' + ",".join(["{}"] * 5_000_000) + "]}",
        '{"prompt": [1], "x": [' + ",".join(["[]"] * 5_000_000) + "]}",
        '{"prompt": [1], "x": [' + ",".join(["1"] * 8_000_000) + "]}",
        '{"prompt": [1], ' + ",".join(f'"x{number}": 1' for number in range(1_000_000)) + "}",
        '{"prompt": [1], "x": ' + '"\\"' * 5_000_000 + '"}',
        '"' * (15 << 20),
    ],
    ids=["messages", "many messages", "objects", "lists", "numbers", "fields", "escapes", "quotes"],
)
def test_absurd_bodies(engine: FakeEngine, content: str) -> None:
    path = "/v1/chat/completions" if "messages" in content[:20] else "/v1/completions"
    memory = engine.memory()
    for _ in range(2):
        answer = httpx2.post(f"{engine.url}{path}", content=content, headers=AUTHORIZED, timeout=LATE)
        assert answer.status_code == 400
    assert engine.memory() < memory + MEMORY


def test_an_absurd_body_is_refused_before_it_is_parsed() -> None:
    content = '{"messages": [' + ",".join([json.dumps(MESSAGE)] * 400_000) + "]}"
    times = []
    for function in (lambda: parse(ChatBody, content.encode()), lambda: json.loads(content)):
        start = time.process_time()
        with suppress(ApiError):
            function()
        times.append(time.process_time() - start)
    assert times[0] < times[1]


def test_large_bodies_that_are_not_absurd() -> None:
    texts = ['[{"a": "b"}], ' * 100_000, "\\" * 1_000_000, '\\"' * 1_000_000]
    for text in texts:
        body = parse(CompletionBody, json.dumps({"prompt": text}).encode())
        assert body.prompt == text
    ids = [123_456] * 1_000_000
    assert parse(CompletionBody, json.dumps({"prompt": ids}).encode()).prompt == ids
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}]}] * 10_000
    assert len(parse(ChatBody, json.dumps({"messages": messages}).encode()).messages) == 10_000


def test_nothing_is_kept_of_unknown_fields() -> None:
    bodies: list[tuple[Any, dict[str, Any]]] = [
        (CompletionBody, {"prompt": "a"}),
        (ChatBody, {"messages": [{**MESSAGE, "x": ["y"]}]}),
    ]
    for kind, fields in bodies:
        body = parse(kind, json.dumps({**fields, "x": ["y"] * 1000}).encode(), kind.check)
        assert not body.model_extra
    assert '"x"' not in body.model_dump_json().replace('"content":"x"', "")
    with pytest.raises(ApiError, match="tools is not supported"):
        parse(ChatBody, json.dumps({**fields, "tools": ["x"]}).encode(), ChatBody.check)


def random_bytes(draw: random.Random) -> bytes:
    """Return a request, several in a row or a part of one, changed at random."""
    pieces = [
        request(AT_ONCE),
        request(NEVER, stream=draw.random() < 0.5),
        request(LONG, stream=draw.random() < 0.5),
        request(SLOW, stream=True),
        request(AT_ONCE, n=draw.choice([0, 1, 5, 1000]), max_tokens=draw.choice([1, -1, 10**9])),
        head(draw.choice([0, 1, 1000, 10**12])),
        head(None) + b"5\r\nhello\r\n",
        b"GET /health HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        b"0\r\n\r\n",
        draw.randbytes(draw.randrange(1000)),
        b'{"prompt": [' + b"[" * draw.randrange(10_000),
    ]
    data = bytearray(b"".join(draw.choice(pieces) for _ in range(draw.choice([1, 1, 2, 4]))))
    for _ in range(draw.choice([0, 0, 1, 5]) if data else 0):
        data[draw.randrange(len(data))] = draw.randrange(256)
    return bytes(data[: draw.choice([len(data), draw.randrange(len(data) + 1)])])


def test_random_clients(engine: FakeEngine) -> None:
    draw = random.Random(11)
    connections: list[socket.socket] = []
    for number in range(300):
        with suppress(ConnectionError):
            connections.append(engine.connect(random_bytes(draw)))
        if connections and draw.random() < 0.7:
            left = connections.pop(draw.randrange(len(connections)))
            if draw.random() < 0.5:
                left.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset
            left.close()
        if number % 50 == 0:
            assert engine.is_healthy()
    for connection in connections:
        connection.close()
