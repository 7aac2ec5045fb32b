"""How a server ends: told to stop, with a dead rank, and started again by torchrun; and its HTTP process with a guard:
silence is noticed, and the port is free once the first rank is gone.
"""

import asyncio
import json
import os
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
import uvicorn
from uvicorn.server import ServerState

import dcpmla.serving.frontend as frontend_module
from dcpmla.serving.connections import Connection, Limits, limit_connections
from dcpmla.serving.frontend import Frontend, listen
from dcpmla.serving.messages import BEAT, Close, pack
from tests.support.launchers import ROOT, environment, free_port, torchrun
from tests.support.one_command import one_command
from tests.support.ranks import start_process
from tests.support.servers import NEEDLE, QUESTION, RunningServer, read_events, serve, wait_until_healthy
from tests.support.waiting import LATE, wait_until


def start(main: Callable[[socket.socket], object], port: int = 0) -> Frontend:
    with listen("127.0.0.1", port) as listener:
        frontend = Frontend(main, listener)
    frontend.start()
    return frontend


def take(frontend: Frontend) -> bytes:
    """Return the first commands."""
    until = time.monotonic() + LATE
    while time.monotonic() < until:
        frontend.wait(1)
        if commands := frontend.take():
            return commands
    raise AssertionError("no command came")


def beat(connection: socket.socket) -> None:
    for _ in range(20):
        connection.sendall(BEAT)
        time.sleep(0.2)
    connection.sendall(pack(Close()))
    time.sleep(LATE)


def test_a_silent_process_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontend_module, "SILENCE", 1)
    monkeypatch.setattr(frontend_module, "_LAST_SECONDS", 1)
    frontend = start(lambda _: time.sleep(LATE))
    with pytest.raises(RuntimeError, match="the HTTP process was silent for 1 s: it is stopped or stuck"):
        take(frontend)
    os.close(frontend._lifeline)  # as at the end of this process
    assert frontend._await_end() == 128 + signal.SIGKILL


def test_a_process_that_beats_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontend_module, "SILENCE", 3)
    frontend = start(beat)
    assert take(frontend) == pack(Close())
    assert frontend.num_taken == len(pack(Close()))
    os.kill(frontend._pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (lambda connection: connection.sendall(pack(Close())[:-1]), "has ended: see its lines above"),  # half a command
        (lambda _: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL, by hand or for want of memory"),
    ],
)
def test_the_end_of_a_process_is_named(main: Callable[[socket.socket], object], words: str) -> None:
    frontend = start(main)
    with pytest.raises(RuntimeError, match=f"the HTTP process {words}"):
        take(frontend)
    frontend.close()


def be_the_first_rank(port: int) -> None:
    frontend_module._LAST_SECONDS = 1.0
    start(lambda _: time.sleep(LATE), port)
    time.sleep(LATE)


@pytest.mark.parametrize("state", ["running", "stopped"])
def test_the_port_is_free_after_the_first_rank_is_killed(state: str) -> None:
    port = free_port()
    rank = psutil.Process(start_process(be_the_first_rank, (port,)).pid)
    wait_until(lambda: len(rank.children(recursive=True)) == 2, "the HTTP process does not start")
    guard, process = rank.children(recursive=True)
    if state == "stopped":
        process.suspend()
    rank.kill()
    _, alive = psutil.wait_procs([guard, process], timeout=LATE)
    assert not alive
    listen("127.0.0.1", port).close()


def test_a_stopped_process_holds_no_step_up(server: RunningServer) -> None:
    """The ranks go on while the process is stopped for less than the limit, and its clients wait."""
    (guard,) = psutil.Process(server.processes[0].pid).children()
    (process,) = guard.children()
    process.suspend()
    time.sleep(2)
    process.resume()
    wait_until_healthy(server.url, LATE, lambda: all(each.is_alive() for each in server.processes), server.log)


class Transport:
    """A connection's end that remembers whether it was aborted."""

    is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True

    def get_extra_info(self, name: str) -> None:
        """Return nothing, as of a socket that is closed."""

    def get_write_buffer_size(self) -> int:
        return 0


def test_connections_have_a_limit() -> None:
    config, state, limits = uvicorn.Config(_no_app, log_config=None), ServerState(), Limits(num_connections=2)
    config.load()

    def connect() -> tuple[Connection, bool]:
        connection, transport = Connection(config, state, {}, limits=limits, request_timeout=1), Transport()
        connection.connection_made(transport)
        if transport.is_aborted:
            connection.connection_lost(ConnectionAbortedError())
        return connection, transport.is_aborted

    async def connect_five() -> list[bool]:
        pairs = [connect() for _ in range(4)]
        pairs[0][0].connection_lost(ConnectionResetError())
        return [is_aborted for _, is_aborted in (*pairs, connect())]

    assert asyncio.run(connect_five()) == [False, False, True, True, False]


async def _no_app(scope: Any, receive: Any, send: Any) -> None:
    """Answer nothing."""


def test_connections_are_fewer_than_files(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: chosen.append(limits))
    for hard, most in ((1024, 960), (1 << 20, 1 << 14), (resource.RLIM_INFINITY, 1 << 14), (10, 1)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, hard=hard: (10, hard))
        assert limit_connections(Limits()).num_connections == most
    assert chosen == [(1024, 1024), (16448, 1 << 20), (16448, resource.RLIM_INFINITY), (10, 10)]


LONG = {"prompt": QUESTION, "temperature": 0, "ignore_eos": True, "stream": True}


class Reader(threading.Thread):
    """A client that reads a stream to its end."""

    def __init__(self, url: str, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self._url, self._body = url, {**LONG, "max_tokens": max_tokens}
        self.status, self.lines, self.begun = 0, list[str](), threading.Event()

    def run(self) -> None:
        with httpx2.stream("POST", f"{self._url}/v1/completions", json=self._body, timeout=60) as response:
            self.status = response.status_code
            for line in response.iter_lines():
                self.lines.append(line)
                self.begun.set()

    @classmethod
    @contextmanager
    def reading(cls, url: str, max_tokens: int) -> Iterator["Reader"]:
        """Run a block once the first token has come, and wait for the last one."""
        reader = cls(url, max_tokens)
        reader.start()
        assert reader.begun.wait(30)
        yield reader
        reader.join(60)
        assert not reader.is_alive()


def test_told_to_stop_while_answering(tmp_path: Path) -> None:
    """By a signal to any rank; before that the queue is full."""
    options = ["--max-num-seqs", 1, "--max-waiting", 1, "--drain-seconds", 30]
    with serve(tmp_path, NEEDLE, 2, *options) as server:
        with Reader.reading(server.url, 120) as running:
            waiting = Reader(server.url, 3)
            waiting.start()
            wait_until(lambda: server.metric("requests_waiting") == 1, "the request does not wait", 0.02)
            answer = httpx2.post(f"{server.url}/v1/completions", json={"prompt": QUESTION}, timeout=30)
            assert (answer.status_code, answer.headers["Retry-After"]) == (429, "1")
            server.stop(rank=1)
            wait_until(lambda: httpx2.get(f"{server.url}/health").status_code != 200, "it does not stop", 0.02)
            assert running.is_alive()
            answer = httpx2.post(f"{server.url}/v1/completions", json={"prompt": QUESTION}, timeout=30)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "stopping")
        waiting.join(30)
        for reader, num_tokens in ((running, 120), (waiting, 3)):
            chunks = read_events(reader.lines)
            assert chunks[-1]["choices"][0]["finish_reason"] == "length"
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == " ".join(["123"] * num_tokens)
        assert server.exit_codes() == [0, 0], server.log()


def test_time_is_over_and_the_port_is_taken(tmp_path: Path) -> None:
    with serve(tmp_path, NEEDLE, 1, "--drain-seconds", 1) as server:
        with Reader.reading(server.url, 8000) as running:
            server.stop()
        error = json.loads(running.lines[-2].removeprefix("data: "))["error"]
        assert (error["type"], error["code"]) == ("server_error", "stopping")
        assert server.exit_codes() == [0], server.log()
        assert "leaked" not in server.log()


def page(*changes: tuple[str, str]) -> list[str]:
    """Return the blocks of docs/serving.md, with some words changed."""
    text = (ROOT / "docs" / "serving.md").read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return re.findall(r"^```\w*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


SMALL = ["--kv-cache-memory-bytes", 4 << 20]


def check_failed_reader(running: "Reader") -> None:
    """Check that a stream ended with an error, since a rank was killed."""
    last = json.loads(running.lines[-2].removeprefix("data: "))
    assert "error" in last, running.lines[-4:]
    assert (last["error"]["type"], last["error"]["code"]) == ("server_error", "rank_failed")


def test_the_pages_commands_and_a_dead_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first command starts two ranks; without one of them all requests fail, and all processes end."""
    port = free_port()
    command, ask, use, *_ = page((":8000", f":{port}"))
    name, *words = shlex.split(command)
    assert name == "dcpmla"
    url = f"http://127.0.0.1:{port}"
    with one_command(tmp_path / "job", *words, "--port", port, *SMALL) as job:
        wait_until_healthy(url, 200, job.process.is_alive)
        if shutil.which("curl"):
            answer = subprocess.run(shlex.split(ask), capture_output=True, check=True, timeout=60).stdout
            assert json.loads(answer)["choices"][0]["text"] == "123"
        exec(use, {})
        assert capsys.readouterr().out.splitlines()[-1].startswith("456 ")
        assert "2 ranks, 2 of them on this host, started by dcpmla, on CPUs" in job.err
        with Reader.reading(url, 8000) as running:
            job.ranks()[1].kill()
        check_failed_reader(running)
        assert job.exit_code() == 128 + signal.SIGKILL
        killed, missing = sorted(job.errors(), reverse=True)
        assert killed.startswith("dcpmla: error: rank 1 was killed by SIGKILL: ")
        assert re.match("dcpmla: error: rank 0 .* rank 1 is missing", missing)


def test_the_command_is_told_to_stop(tmp_path: Path) -> None:
    """Its ranks then finish the requests, and end in order."""
    with one_command(tmp_path / "job", "serve", NEEDLE, "-tp", 2, "-dcp", 2, "--port", 0, *SMALL) as job:
        job.wait_for("serving on ")
        url = job.out.partition("serving on ")[2].splitlines()[0]
        with Reader.reading(url, 60) as running:
            job.send(signal.SIGTERM)
        assert read_events(running.lines)[-1]["choices"][0]["finish_reason"] == "length"
        assert job.exit_code() == 0
        assert job.errors() == []


def test_torchrun_starts_a_server_again(tmp_path: Path) -> None:
    port = free_port()
    program = ["-m", "dcpmla", "serve", NEEDLE, "-tp", 2, "-dcp", 2, "--port", port, "--device", "cpu", *SMALL]
    argv = torchrun(program, 2, "--standalone", "--max-restarts", 3, "--monitor-interval", 0.2)
    url = f"http://127.0.0.1:{port}"
    with (tmp_path / "output").open("wb") as output:
        agent = psutil.Popen(list(map(str, argv)), env=environment(), cwd=ROOT, stdout=output, stderr=output)
    try:
        wait_until_healthy(url, 200, agent.is_running)
        # The first rank has children that serve HTTP.
        (rank_1,) = (rank for rank in agent.children() if not rank.children())
        with Reader.reading(url, 8000) as running:
            rank_1.kill()
        check_failed_reader(running)
        wait_until_healthy(url, 200, agent.is_running)
    finally:
        for process in [*agent.children(recursive=True), agent]:
            process.kill()
        agent.wait()
    assert "2 ranks, 2 of them on this host, started by torchrun, on CPUs" in (tmp_path / "output").read_text()
