"""Requests of hostile clients at a live server: each ends, whether its client waits or leaves, and nothing is left."""

import json
import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest

from tests.hostile_soak import OPTIONS, hostile, is_quiet, num_processes
from tests.support.servers import AUTHORIZED, KEY, QUESTION, RunningServer, needle_with_template, serve

ENDS = {200, 400, 404}


def leave(server: RunningServer, path: str, content: bytes) -> None:
    """Send a request, and leave before its answer."""
    address = urlsplit(server.url)
    head = f"POST {path} HTTP/1.1\r\nHost: {address.netloc}\r\nAuthorization: Bearer {KEY}\r\n"
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_hostile_requests_end(num_ranks: int, tmp_path: Path) -> None:
    body = {"prompt": QUESTION, "max_tokens": 4, "temperature": 0}
    with (
        serve(tmp_path, needle_with_template(tmp_path), num_ranks, "--api-key", KEY, *OPTIONS) as server,
        httpx2.Client(base_url=server.url, headers=AUTHORIZED, timeout=300) as client,
    ):
        expected = client.post("/v1/completions", json=body).json()["choices"]
        num_at_rest = num_processes(server)
        for number in range(2):
            for path, request in hostile(number):
                leave(server, path, json.dumps(request).encode())
                assert client.get("/health").status_code == 200
        for path, request in hostile(2):
            answer = client.post(path, json=request)
            assert answer.status_code in ENDS, answer.text[:500]
            assert client.post("/v1/completions", json=body).json()["choices"] == expected
        until = time.monotonic() + 120
        while not is_quiet(server, num_at_rest) and time.monotonic() < until:
            time.sleep(0.1)
        assert is_quiet(server, num_at_rest)
