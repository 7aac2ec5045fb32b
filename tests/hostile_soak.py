"""A soak of a server: honest clients alone, then beside hostile ones; a program of its own, outside the suite.

    python tests/hostile_soak.py                     1 minute of honest clients, 10 of both, on one rank
    python tests/hostile_soak.py --ranks 2 --seconds 60 --json out.json

It fails where an honest request is not answered with 200, where their 99th percentile beside hostile clients is more
than three times the one alone, where the server's memory grows by more than 1 GiB, or where anything is left after.
"""

import argparse
import json
import multiprocessing
import os
import random
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import quantiles
from typing import Any
from urllib.parse import urlsplit

import httpx2
import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.servers import AUTHORIZED, KEY, QUESTION, RunningServer, needle_with_template, serve  # noqa: E402

_MOST_GROWTH = 1 << 30
_REST = 20.0  # seconds in which all that hostile clients have begun must end
_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
OPTIONS = ("--max-model-len", 2048, "--kv-cache-memory-bytes", 64 << 20)  # so that memory does not grow with the cache
_WIDE = {"type": "object", "properties": {"a": {"enum": list(range(200_000))}}}


def honest(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Return a small request: a completion, a chat, or a text to tokenize."""
    return rng.choice(
        [
            (_COMPLETIONS, {"prompt": QUESTION, "max_tokens": 4, "temperature": 0}),
            (_CHAT, {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 4, "temperature": 0}),
            ("/tokenize", {"prompt": QUESTION}),
        ]
    )


def hostile(number: int) -> list[tuple[str, dict[str, Any]]]:
    """Return requests that ask for much work, one of each kind, with a number that none had before.

    The work is the HTTP process's: steps of the engine are the model's, and any client's share of them is its right.
    """
    schema = {"anyOf": [{"type": "integer", "multipleOf": 999_983 + number}, {"type": "integer", "multipleOf": 7919}]}
    tool = {"type": "function", "function": {"name": "f", "parameters": _WIDE}}
    return [
        ("/tokenize", {"messages": [{"role": "system", "content": "x" * 400}] * 4000}),
        (_CHAT, {"messages": [{"role": "user", "content": f"word {number} " * 200_000}]}),
        ("/tokenize", {"prompt": "a" * 500_000}),
        ("/detokenize", {"tokens": [5] * 500_000}),
        (_COMPLETIONS, {"prompt": [5], "max_tokens": 1, "structured_outputs": {"json": schema}}),
        (_COMPLETIONS, {"prompt": [5], "structured_outputs": {"regex": f"(a{{1000}}{number}){{1000}}"}}),
        (_COMPLETIONS, {"prompt": [5] * 60, "prompt_logprobs": 20, "max_tokens": 4, "logprobs": 20, "n": 4}),
        (_COMPLETIONS, {"prompt": [[5] * 60] * 8, "echo": True, "logprobs": 20, "max_tokens": 1}),
        (_COMPLETIONS, {"prompt": [5], "prompt_logprobs": 1 << 40, "max_tokens": 1 << 40, "n": 128}),
        (_CHAT, {"messages": [{"role": "user", "content": "a"}], "tools": [tool], "tool_choice": "required"}),
        ("/kv/connect", {"engine": str(number), "layout": {}, "agents": []}),
        ("/kv/prefill", {"engine": str(number), "handoff": "h", "prompt_token_ids": [5], "params": {}}),
    ]


def attack(server: RunningServer, rng: random.Random) -> str:
    """Send a hostile request, one in ten cut off; read its answer, or leave at some time. Return its status, or how it
    ended.
    """
    path, body = rng.choice(hostile(rng.randrange(1 << 40)))
    content = json.dumps(body).encode()
    content = content[: rng.randrange(len(content))] if rng.random() < 0.1 else content
    address = urlsplit(server.url)
    head = f"POST {path} HTTP/1.1\r\nHost: {address.netloc}\r\nAuthorization: Bearer {KEY}\r\nConnection: close\r\n"
    if rng.random() < 0.1:
        head = head.replace("POST ", "GET /\0")
    try:
        with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
            connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
            connection.settimeout(rng.choice([0.001, 0.1, 1.0, 30.0]))
            status = connection.recv(12)[-3:].decode()
            while connection.recv(1 << 16):
                pass
            return status
    except TimeoutError:
        return "left"
    except OSError:
        return "closed"


def in_threads(num: int, seconds: float, work: Callable[[random.Random], None]) -> list[threading.Thread]:
    """Start threads that repeat some work for a while."""
    until = time.monotonic() + seconds

    def repeat(seed: int) -> None:
        rng = random.Random(seed)
        while time.monotonic() < until:
            work(rng)

    threads = [threading.Thread(target=repeat, args=(seed,)) for seed in range(num)]
    for thread in threads:
        thread.start()
    return threads


def ask_for(server: RunningServer, seconds: float) -> dict[str, Any]:
    """Return what honest clients see: the number, the 99th percentile and the statuses of their answers."""
    client = httpx2.Client(base_url=server.url, headers=AUTHORIZED, timeout=120)
    times: list[float] = []
    statuses: Counter[int] = Counter()

    def ask(rng: random.Random) -> None:
        path, body = honest(rng)
        start = time.monotonic()
        statuses.update([client.post(path, json=body).status_code])
        times.append(time.monotonic() - start)
        time.sleep(rng.uniform(0, 0.1))

    for thread in in_threads(4, seconds, ask):
        thread.join()
    return {"requests": len(times), "p99_s": quantiles(times, n=100)[98], "statuses": dict(statuses)}


def attack_for(server: RunningServer, seconds: float) -> dict[str, int]:
    """Return how many hostile requests ended how. Their clients get what the server leaves of the processors, because
    they would be on other hosts.
    """
    os.nice(19)
    ends: Counter[str] = Counter()
    for thread in in_threads(8, seconds, lambda rng: ends.update([attack(server, rng)])):
        thread.join()
    return dict(ends)


class Apart:
    """A function that runs in a process of its own, as clients do."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        fork = multiprocessing.get_context("fork")
        self._ours, theirs = fork.Pipe()
        self._process = fork.Process(target=lambda: theirs.send(function(*args)))
        self._process.start()

    @property
    def is_running(self) -> bool:
        return self._process.is_alive() and not self._ours.poll()

    def result(self) -> Any:
        """Wait for the function's result, and return it."""
        found = self._ours.recv()
        self._process.join()
        return found


def memory_of(server: RunningServer) -> int:
    """Return the bytes of all processes of a server."""
    total = 0
    for process in server.processes:
        parent = psutil.Process(process.pid)
        for each in [parent, *parent.children(recursive=True)]:
            with suppress(psutil.Error):
                total += each.memory_full_info().uss
    return total


def num_processes(server: RunningServer) -> int:
    """Return the number of processes of a server: those that it has at rest, and children that work for clients."""
    return sum(1 + len(psutil.Process(process.pid).children(recursive=True)) for process in server.processes)


def is_quiet(server: RunningServer, num_at_rest: int) -> bool:
    """Return whether no request runs or waits, and no child works for a client that has gone."""
    names = ("requests_running", "requests_waiting")
    return num_processes(server) <= num_at_rest and not any(server.metric(name) for name in names)


def soak(server: RunningServer, seconds: float) -> dict[str, Any]:
    """Return the measurements of a server."""
    alone = Apart(ask_for, server, seconds / 10).result()
    before, most = memory_of(server), 0
    num_at_rest = num_processes(server)
    beside, hostile_ones = Apart(ask_for, server, seconds), Apart(attack_for, server, seconds)
    while beside.is_running or hostile_ones.is_running:
        most = max(most, memory_of(server))
        time.sleep(1)
    until = time.monotonic() + _REST
    while not (quiet := is_quiet(server, num_at_rest)) and time.monotonic() < until:
        time.sleep(0.5)
    return {
        "honest_alone": alone,
        "honest_beside": beside.result(),
        "hostile": hostile_ones.result(),
        "memory_before": before,
        "memory_most": most,
        "memory_after": memory_of(server),
        "is_quiet": quiet,
    }


def faults_of(found: dict[str, Any]) -> list[str]:
    """Return what is wrong with the measurements."""
    alone, beside = found["honest_alone"], found["honest_beside"]
    faults = [f"honest requests got {each['statuses']}" for each in (alone, beside) if set(each["statuses"]) != {200}]
    if beside["p99_s"] > 3 * alone["p99_s"]:
        faults.append(f"p99 is {beside['p99_s']:.2f} s beside hostile clients, {alone['p99_s']:.2f} s alone")
    if found["memory_most"] - found["memory_before"] > _MOST_GROWTH:
        faults.append(f"memory grew from {found['memory_before'] >> 20} to {found['memory_most'] >> 20} MiB")
    return faults if found["is_quiet"] else [*faults, "work is left after all clients have gone"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return 1 if there are faults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=600.0, help="time with hostile clients")
    parser.add_argument("--json", type=Path, metavar="PATH")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        model = needle_with_template(Path(folder))
        with serve(Path(folder), model, options.ranks, "--api-key", KEY, *OPTIONS) as server:
            found = soak(server, options.seconds)
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    faults = faults_of(found)
    print("\n".join(faults) or "no faults")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
