"""The HTTP process: from a listening socket and a connection to the first rank to the end of the server."""

import asyncio
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dcpmla.serving.app import Api, Settings
from dcpmla.serving.client import Engine
from dcpmla.serving.metrics import Metrics

_HEAD_BYTES = 64 << 10
_HEAD_SECONDS = 30.0  # that a connection may take for the head of its next request
_FLUSH = 3  # seconds for the answers that are left, at the end
_POLL = 0.1


class Protocol(HttpToolsProtocol):
    """A connection whose next request must have its head within time, and of bounded size."""

    _head_timer: asyncio.TimerHandle | None = None
    _num_head_bytes = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        self._num_head_bytes += len(data)
        super().data_received(data)
        if self._head_timer is not None and self._num_head_bytes > _HEAD_BYTES:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_head_bytes = 0
        self._wait_for_head()

    def on_headers_complete(self) -> None:
        self._stop_timer()
        super().on_headers_complete()

    def _wait_for_head(self) -> None:
        self._stop_timer()
        self._head_timer = self.loop.call_later(_HEAD_SECONDS, self.transport.close)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        self._head_timer = None


class _Server(uvicorn.Server):
    """uvicorn without signals: the first rank says when to stop."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve_http(
    connection: socket.socket, listener: socket.socket, settings: Settings, max_waiting: int, drain_seconds: float
) -> None:
    """Serve until the ranks have stopped or failed.

    Args:
        connection: to the first rank.
        max_waiting: most requests beyond those that run.
        drain_seconds: that running requests have to finish, once the job is told to stop.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # launchers send them to all processes; the ranks decide
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    uvloop.run(_serve(connection, listener, settings, max_waiting, drain_seconds))


async def _serve(
    connection: socket.socket, listener: socket.socket, settings: Settings, max_waiting: int, drain_seconds: float
) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    engine = Engine(reader, writer, max_waiting, Metrics())
    config = uvicorn.Config(
        Api(engine, settings).app(),
        http=Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_FLUSH,
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    draining = asyncio.create_task(_drain(engine, drain_seconds))
    try:
        await engine.listen()
    finally:
        draining.cancel()
        server.should_exit = True
        await serving


async def _drain(engine: Engine, seconds: float) -> None:
    """Once the ranks are told to stop, give open requests some seconds, then let the ranks end."""
    await engine.drain.wait()
    until = asyncio.get_running_loop().time() + seconds
    while engine.num_open and asyncio.get_running_loop().time() < until:
        await asyncio.sleep(_POLL)
    engine.close()
