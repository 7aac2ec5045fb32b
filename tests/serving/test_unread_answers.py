"""Answers that a client does not read, reads slowly, or gets before it has sent the body."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

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
