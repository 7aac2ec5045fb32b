"""The HTTP process and its guard: silence is noticed, and the port is free once the first rank is gone."""

import asyncio
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import uvicorn
from uvicorn.server import ServerState

import dcpmla.serving.frontend as frontend_module
from dcpmla.serving.connections import Connection, Limits, limit_connections
from dcpmla.serving.frontend import Frontend, listen
from dcpmla.serving.messages import BEAT, Close, pack
from tests.support.launchers import free_port
from tests.support.ranks import start_process
from tests.support.servers import RunningServer, wait_until_healthy
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
