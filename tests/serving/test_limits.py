"""Limits of a connection: whatever its state, a client cannot hold it, its memory or the event loop for ever.

Nor can one that does not read its answer, reads it slowly, or gets it before it has sent the body.
"""

import json
import os
import random
import socket
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx2
import pytest

from tests.support.fake_ranks import (
    AT_ONCE,
    ENDLESS,
    LONG,
    LONG_TEXT,
    NEVER,
    SLOW,
    FakeRanks,
    head,
    is_closed,
    request,
)
from tests.support.servers import AUTHORIZED, KEY, read_events
from tests.support.waiting import LATE, wait_until

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
def test_endless_bytes(ranks: FakeRanks, start: bytes, piece: bytes) -> None:
    connection = ranks.connect(start)
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


def test_dripping_bytes_and_silence(ranks: FakeRanks) -> None:
    """On connections that are open at the same time."""
    silent, late = [ranks.connect(start) for start in SILENT], ranks.connect(head(100))
    dripping = [(ranks.connect(start), piece) for start, piece in DRIPPING]
    with ThreadPoolExecutor(len(dripping)) as pool:
        sent = pool.map(lambda each: send_until_closed(*each, LATE * 10 * len(each[1]), 0.1), dripping)
        ask_well(ranks)
    for (connection, piece), num_sent in zip(dripping, sent, strict=True):
        assert num_sent < LATE * 10 * len(piece), piece
        assert is_closed(connection)
    assert all(map(is_closed, silent))
    assert late.recv(1000).startswith(b"HTTP/1.1 408")
    late.close()


def test_bodies_have_a_total(ranks: FakeRanks) -> None:
    """Two of three stop before their end; the third is refused, and the server keeps nothing once they are gone."""
    data = head(14 << 20) + b" " * (11 << 20)
    connections = [ranks.connect(data) for _ in range(2)]
    answer = httpx2.post(f"{ranks.url}/v1/completions", content=b" " * (14 << 20), headers=AUTHORIZED, timeout=LATE)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert ranks.is_healthy()
    for connection in connections:
        connection.close()
    wait_until(lambda: ranks.num_connections() == 0, "connections are left")
    body = json.dumps({"prompt": [AT_ONCE], "user": "x" * (14 << 20)})
    for _ in range(4):
        answer = httpx2.post(f"{ranks.url}/v1/completions", content=body, headers=AUTHORIZED, timeout=LATE)
        assert answer.status_code == 200


STATUSES = {200, 400, 401, 404, 405, 408, 411, 413, 414, 415, 422, 429, 431, 501, 503, 505}


def random_bytes(draw: random.Random) -> bytes:
    """Return a request, several in a row or a part of one, changed at random."""
    lengths = ["-1", str(10**30), "9", "1, 2", "x", "3\r\nTransfer-Encoding: chunked", "3\r\n: b", "3\r\n" + "a" * 9000]
    chunks = [b"5\r\nhello\r\n", b"zz\r\n", b"-1\r\n", b"fffffffffffffffff\r\n", b"3\r\nabcdef\r\n"]
    pieces = [
        request(AT_ONCE),
        request(NEVER, stream=draw.random() < 0.5),
        request(LONG, stream=draw.random() < 0.5),
        request(SLOW, stream=True),
        request(AT_ONCE, n=draw.choice([0, 1, 5, 1000]), max_tokens=draw.choice([1, -1, 10**9])),
        head(draw.choice([0, 1, 1000, 10**12]), draw.choice(["/v1/chat/completions", "/tokenize", "/x"])),
        head(0).replace(b"Content-Length: 0", f"Content-Length: {draw.choice(lengths)}".encode()) + b"{}",
        head(None) + draw.choice(chunks),
        b"GET /health HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        b"0\r\n\r\n",
        draw.randbytes(draw.randrange(1000)),
        b'{"prompt": [' + b"[" * draw.randrange(10_000),
    ]
    data = bytearray(b"".join(draw.choice(pieces) for _ in range(draw.choice([1, 1, 2, 4]))))
    for _ in range(draw.choice([0, 0, 1, 5]) if data else 0):
        data[draw.randrange(len(data))] = draw.randrange(256)
    return bytes(data[: draw.choice([len(data), draw.randrange(len(data) + 1)])])


def ask_well(ranks: FakeRanks, **fields: Any) -> None:
    """Send a request until it is taken, and check its whole answer."""
    body, until = {"prompt": [AT_ONCE], **fields}, time.monotonic() + LATE
    while True:
        answer = httpx2.post(f"{ranks.url}/v1/completions", json=body, headers=AUTHORIZED, timeout=LATE)
        if answer.status_code not in (429, 503):
            break
        assert time.monotonic() < until, "the request is not taken"
        time.sleep(0.1)
    assert answer.status_code == 200
    values = read_events(answer.text.splitlines()) if fields.get("stream") else [answer.json()]
    texts = [(choice["index"], choice["text"]) for value in values for choice in value["choices"]]
    assert sorted(texts) == [(index, "a") for index in range(fields.get("n", 1))]


def test_random_clients(ranks: FakeRanks) -> None:
    """Whatever they send and however they leave, well-formed requests are answered. DCPMLA_FUZZ_SEED chooses others."""
    draw = random.Random(int(os.environ.get("DCPMLA_FUZZ_SEED", "0")))
    connections: list[socket.socket] = []
    statuses = Counter[int]()
    for number in range(400):
        with suppress(ConnectionError):
            connections.append(ranks.connect(random_bytes(draw)))
        if connections and draw.random() < 0.7:
            left = connections.pop(draw.randrange(len(connections)))
            with suppress(OSError):
                left.settimeout(draw.choice([0, 0, 0.2]))
                start = left.recv(100)
                statuses[int(start.split()[1]) if start.startswith(b"HTTP/1.1 ") else 0] += 1
                if draw.random() < 0.5:
                    left.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset
                elif draw.random() < 0.5:
                    left.shutdown(socket.SHUT_WR)
            left.close()
        if number % 40 == 0:
            assert ranks.is_healthy()
            ask_well(ranks, n=draw.choice([1, 2]), stream=draw.random() < 0.5)
    for connection in connections:
        connection.close()
    assert statuses.keys() - {0} <= STATUSES
    assert statuses[200], statuses
    assert statuses[400], statuses


UNREAD = [
    request(LONG),
    request(LONG).replace(b"\r\n", b"\r\nConnection: close\r\n", 1),
    request(LONG, stream=True),
    request(ENDLESS, stream=True),
]


def test_answers_that_are_not_read(ranks: FakeRanks) -> None:
    num_before = len(ranks.submitted)
    connections = [ranks.connect(data, buffer=4096) for data in UNREAD for _ in range(2)]
    wait_until(lambda: len(ranks.submitted) == num_before + len(connections), "the requests do not come")
    assert ranks.is_healthy()
    wait_until(lambda: ranks.num_connections() == 0, "answers are held")
    for connection in connections:
        connection.close()


def read_slowly(connection: socket.socket) -> int:
    """Read a long answer in 8 s, which is several times `send_seconds`; return the number of its bytes."""
    num_read = 0
    while num_read < len(LONG_TEXT) and (part := connection.recv(1 << 20)):
        num_read += len(part)
        time.sleep(len(part) / (1 << 20))
    connection.close()
    return num_read


def test_slow_answers_come_whole(ranks: FakeRanks) -> None:
    """They take longer than any limit but --request-timeout, and connections are kept meanwhile."""
    body = {"prompt": [SLOW]}
    connections = [ranks.connect(request(LONG, stream=stream), buffer=1 << 18) for stream in (False, True)]
    with (
        httpx2.Client(base_url=ranks.url, headers=AUTHORIZED, timeout=LATE) as client,
        ThreadPoolExecutor(3) as pool,
    ):
        numbers_read = pool.map(read_slowly, connections)
        whole = pool.submit(client.post, "/v1/completions", json=body)
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            chunks = read_events([*response.iter_lines()])
        assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == "a" * 16
        assert whole.result().json()["choices"][0]["text"] == "a" * 16
        kept = client.post("/v1/completions", json={"prompt": [AT_ONCE]})
        assert kept.json()["choices"][0]["text"] == "a"
        assert all(num_read >= len(LONG_TEXT) for num_read in numbers_read)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (head(16 << 20, key="wrong"), 401),
        (head(None, key="wrong"), 401),
        (head((16 << 20) + 1), 413),
    ],
)
def test_an_answer_before_the_body(ranks: FakeRanks, data: bytes, status: int) -> None:
    connection = ranks.connect(data)
    assert connection.recv(1000).startswith(f"HTTP/1.1 {status}".encode())
    connection.close()


def test_a_full_queue_reads_no_body(ranks: FakeRanks) -> None:
    running = [ranks.connect(request(NEVER)) for _ in range(8)]
    wait_until(lambda: len(ranks.open) == 8, "the requests do not come")
    connection = ranks.connect(head(16 << 20))
    assert connection.recv(1000).startswith(b"HTTP/1.1 429")
    for each in [connection, *running]:
        each.close()


@pytest.mark.parametrize(("key", "status"), [("wrong", b"401"), (KEY, b"200")])
def test_a_request_that_expects_100_is_the_last_one(ranks: FakeRanks, key: str, status: bytes) -> None:
    """Refused early, its client may still send the body: no byte of it may be taken for another request."""
    body = json.dumps({"prompt": [AT_ONCE]}).encode()
    connection = ranks.connect(head(len(body), key=key)[:-2] + b"Expect: 100-continue\r\n\r\n")
    answer = connection.recv(1 << 16)
    if key == KEY:
        assert answer == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        answer = connection.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert b"connection: close" in answer
    assert is_closed(connection)
