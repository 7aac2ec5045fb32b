"""Random clients against a server: whatever they send and however they leave, well-formed requests are answered, and
nothing of the others is left. DCPMLA_FUZZ_SEED chooses another run.
"""

import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException
from typing import Any

import httpx2
import psutil
import pytest

from tests.support.fuzz import GOOD, LATE, ROUTES, Connection, framed, garbage, random_body
from tests.support.servers import KEY, RunningServer

SEED = int(os.environ.get("DCPMLA_FUZZ_SEED", "0"))
NUM_CLIENTS, NUM_ACTIONS, FUZZ_SECONDS = 8, 12, 15  # Clients stop at either of the last two.
PATIENCE = 2.0  # seconds until a client abandons a request that may be long
MEMORY = 150 << 20  # bytes that a process may grow by
STATUSES = {200, 400, 401, 404, 405, 408, 411, 413, 414, 415, 422, 429, 431, 501, 503, 505}


def is_json(body: bytes) -> bool:
    """Return whether a lenient parser takes a body."""
    with suppress(ValueError, RecursionError):
        json.loads(body)
        return True
    return False


def texts_of(values: list[Any]) -> dict[int, str]:
    """Return the text of each choice, of a whole answer or of a stream's events."""
    texts: dict[int, str] = {}
    for value in values:
        for choice in value["choices"] if isinstance(value, dict) else ():
            part = choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + part
    return texts


def ask_well(url: str, draw: random.Random, number: int, stream: bool) -> dict[int, str]:
    """Send a well-formed request until it is taken; return the texts of its complete answer."""
    route, fields = GOOD[number]
    until = time.monotonic() + LATE
    while True:
        connection = Connection(url)
        connection.send(framed(draw, route, json.dumps({**fields, "stream": stream}).encode()))
        status, values = connection.answer()
        connection.socket.close()
        if status not in (429, 503):
            assert status == 200, (status, values, route, fields)
            assert not stream or values[-1] == "[DONE]", values[-1]
            return texts_of(values)
        assert time.monotonic() < until, "the request is not taken"
        time.sleep(0.1)


class Client:
    """A client that does one random thing after another; each answer is checked."""

    def __init__(self, url: str, number: int, expected: list[dict[int, str]]) -> None:
        self.url, self.expected, self.draw = url, expected, random.Random(f"{SEED} {number}")
        self.counts: Counter[str] = Counter()
        self.sent = b""

    def run(self) -> Counter[str]:
        until = time.monotonic() + FUZZ_SECONDS
        actions: list[Callable[[], None]] = [self.well, self.strange, self.strange, self.garbage, self.cut]
        actions += [self.stop_reading, self.pipeline]
        for number in range(NUM_ACTIONS):
            if time.monotonic() > until:
                break
            action = self.draw.choice(actions)
            try:
                action()
            except Exception as error:
                error.add_note(f"DCPMLA_FUZZ_SEED={SEED}, action {number}, {action.__name__}: {self.sent[:2000]!r}")
                raise
            self.counts[action.__name__] += 1
        return self.counts

    def well(self) -> None:
        number = self.draw.randrange(len(GOOD))
        assert ask_well(self.url, self.draw, number, self.draw.random() < 0.5) == self.expected[number]

    def strange(self) -> None:
        route = self.draw.choice(ROUTES)
        body = random_body(self.draw, route)
        if is_json(body):  # It may be good, and ask for more than a client waits for.
            self._send(framed(self.draw, route, body), PATIENCE)
            return
        connection = self._connect(framed(self.draw, route, body))
        status, _ = connection.answer()
        assert status in STATUSES - {200}, status
        connection.leave(self.draw)

    def garbage(self) -> None:
        self._send(garbage(self.draw), 0.1)

    def cut(self) -> None:
        whole = framed(self.draw, *self._good())
        self._send(whole[: self.draw.randrange(len(whole))], self.draw.choice([0.001, 0.1]))

    def stop_reading(self) -> None:
        route, body = self._good(max_tokens=self.draw.choice([20, 400]), stream=True)
        connection = self._connect(framed(self.draw, route, body))
        connection.socket.settimeout(PATIENCE)
        with suppress(TimeoutError):
            connection.socket.recv(self.draw.choice([1, 200, 5000]))
        connection.leave(self.draw)

    def pipeline(self) -> None:
        numbers = [self.draw.randrange(len(GOOD)) for _ in range(self.draw.randint(2, 4))]
        requests = [(GOOD[number][0], json.dumps(GOOD[number][1]).encode()) for number in numbers]
        connection = self._connect(b"".join(framed(self.draw, *request) for request in requests))
        with suppress(ConnectionError):  # The server may close the connection of a client that pipelines.
            for number in numbers:
                status, values = connection.answer()
                assert status in (200, 429, 503), (status, values)
                assert status != 200 or texts_of(values) == self.expected[number]
        connection.leave(self.draw)

    def _good(self, **changes: Any) -> tuple[str, bytes]:
        route, fields = self.draw.choice(GOOD)
        return route, json.dumps({**fields, **changes}).encode()

    def _connect(self, data: bytes) -> Connection:
        self.sent = data
        connection = Connection(self.url)
        connection.send(data)
        return connection

    def _send(self, data: bytes, patience: float) -> None:
        """Send bytes, and check the answer if one comes soon; abandon it otherwise."""
        connection = self._connect(data)
        connection.socket.settimeout(patience)
        with suppress(TimeoutError, ConnectionError, HTTPException):
            status, values = connection.answer()
            assert status in STATUSES, (status, values)
            self.counts[f"status {status}"] += 1
        connection.leave(self.draw)


def processes_of(server: RunningServer) -> list[psutil.Process]:
    """Return rank 0's process and its children, the HTTP process among them."""
    first = psutil.Process(server.processes[0].pid)
    return [first, *first.children(recursive=True)]


def wait_until_idle(server: RunningServer) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    until = time.monotonic() + LATE
    while left := {
        name: value for name in ("requests_running", "requests_waiting") if (value := server.metric(name, **headers))
    }:
        assert time.monotonic() < until, left
        time.sleep(0.1)


@pytest.mark.timeout(300)
def test_random_clients(server: RunningServer) -> None:
    print(f"DCPMLA_FUZZ_SEED={SEED}")  # pytest shows it with a failure
    draw = random.Random(SEED)
    expected = [ask_well(server.url, draw, number, stream=False) for number in range(len(GOOD))]
    log_at, counts = len(server.log()), Counter[str]()
    memory: dict[int, int] = {}
    for part in range(2):  # the first run brings each process to its usual size
        clients = [Client(server.url, NUM_CLIENTS * part + number, expected) for number in range(NUM_CLIENTS)]
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            running = [pool.submit(client.run) for client in clients]
            while not all(each.done() for each in running):
                assert httpx2.get(f"{server.url}/health", timeout=LATE).status_code == 200
                time.sleep(0.5)
            for each in running:
                counts += each.result()
        wait_until_idle(server)
        for process in processes_of(server):
            size = process.memory_info().rss
            assert size < memory.setdefault(process.pid, size) + MEMORY, process.cmdline()
    assert all(counts[name] for name in ("well", "strange", "garbage", "cut", "stop_reading", "pipeline")), counts
    assert counts["status 200"], counts
    assert counts["status 400"], counts
    for number, texts in enumerate(expected):
        assert ask_well(server.url, draw, number, stream=True) == texts
    assert all(process.is_alive() for process in server.processes)
    assert "Traceback" not in server.log()[log_at:]
