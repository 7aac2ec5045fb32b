"""Requests of hostile clients at a live server: each ends, whether its client waits or leaves, and nothing is left."""

import json
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import psutil
import pytest

from tests.support.servers import AUTHORIZED, KEY, QUESTION, RunningServer, needle_with_template, serve
from tests.support.waiting import wait_until

ENDS = {200, 400, 404}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
OPTIONS = ("--max-model-len", 2048, "--kv-cache-memory-bytes", 64 << 20)  # so that memory does not grow with the cache
WIDE = {"type": "object", "properties": {"a": {"enum": list(range(200_000))}}}


def hostile(number: int) -> list[tuple[str, dict[str, Any]]]:
    """Return requests that ask for much work, one of each kind, with a number that none had before.

    The work is the HTTP process's: steps of the engine are the model's, and any client's share of them is its right.
    """
    schema = {"anyOf": [{"type": "integer", "multipleOf": 999_983 + number}, {"type": "integer", "multipleOf": 7919}]}
    tool = {"type": "function", "function": {"name": "f", "parameters": WIDE}}
    return [
        ("/tokenize", {"messages": [{"role": "system", "content": "x" * 400}] * 4000}),
        (CHAT, {"messages": [{"role": "user", "content": f"word {number} " * 200_000}]}),
        ("/tokenize", {"prompt": "a" * 500_000}),
        ("/detokenize", {"tokens": [5] * 500_000}),
        (COMPLETIONS, {"prompt": [5], "max_tokens": 1, "structured_outputs": {"json": schema}}),
        (COMPLETIONS, {"prompt": [5], "structured_outputs": {"regex": f"(a{{1000}}{number}){{1000}}"}}),
        (COMPLETIONS, {"prompt": [5] * 60, "prompt_logprobs": 20, "max_tokens": 4, "logprobs": 20, "n": 4}),
        (COMPLETIONS, {"prompt": [[5] * 60] * 8, "echo": True, "logprobs": 20, "max_tokens": 1}),
        (COMPLETIONS, {"prompt": [5], "prompt_logprobs": 1 << 40, "max_tokens": 1 << 40, "n": 128}),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "tools": [tool], "tool_choice": "required"}),
        ("/kv/connect", {"engine": str(number), "layout": {}, "agents": []}),
        ("/kv/prefill", {"engine": str(number), "handoff": "h", "prompt_token_ids": [5], "params": {}}),
    ]


def num_processes(server: RunningServer) -> int:
    """Return the number of processes of a server: those that it has at rest, and children that work for clients."""
    return sum(1 + len(psutil.Process(process.pid).children(recursive=True)) for process in server.processes)


def is_quiet(server: RunningServer, num_at_rest: int) -> bool:
    """Return whether no request runs or waits, and no child works for a client that has gone."""
    names = ("requests_running", "requests_waiting")
    return num_processes(server) <= num_at_rest and not any(server.metric(name) for name in names)


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
        wait_until(lambda: is_quiet(server, num_at_rest), "requests or children are left")
