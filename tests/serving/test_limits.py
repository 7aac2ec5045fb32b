"""Limits of a connection: whatever its state, a client cannot hold it, its memory or the event loop for ever."""

import json
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx2
import pytest

from tests.support.fake_engine import (
    AT_ONCE,
    AUTHORIZED,
    LATE,
    LONG,
    MEMORY,
    NEVER,
    SLOW,
    FakeEngine,
    head,
    is_closed,
    request,
    wait_until,
)

pytestmark = pytest.mark.usefixtures("within_limits")


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


DRIPPING = [
    (b"", b"G"),
    (b"GET /health HTTP/1.1\r\n\r\n", b"G"),
    (b"GET /health HTTP/1.1\r\n\r\n", b"\r\n"),
    (head(1000, key="wrong"), b"x"),
    (head(1000), b"x"),
    (head(None, key="wrong") + b"0\r\na: ", b"x"),
]
SILENT = [b"", b"GET / HT", head(None) + b"0\r\n"]


def test_dripping_bytes_and_silence(engine: FakeEngine) -> None:
    """On connections that are open at the same time."""
    silent = [engine.connect(start) for start in SILENT]
    dripping = [(engine.connect(start), piece) for start, piece in DRIPPING]
    with ThreadPoolExecutor(len(dripping)) as pool:
        sent = pool.map(lambda each: send_until_closed(*each, LATE * 10 * len(each[1]), 0.1), dripping)
    for (connection, piece), num_sent in zip(dripping, sent, strict=True):
        assert num_sent < LATE * 10 * len(piece), piece
        assert is_closed(connection)
    assert all(map(is_closed, silent))


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
