"""The HTTP process: from a listening socket and a connection to the first rank to the end of the server."""

import asyncio
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import uvicorn
import uvloop

from dcpmla.serving.app import Api, Settings
from dcpmla.serving.client import Engine
from dcpmla.serving.connections import Connection, Limits
from dcpmla.serving.metrics import Metrics

_FLUSH = 3  # Seconds for the remaining answers at the end.
_POLL = 0.1


class _Server(uvicorn.Server):
    """uvicorn without signals: the first rank says when to stop."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve_http(
    connection: socket.socket,
    listener: socket.socket,
    settings: Settings,
    max_waiting: int,
    drain_seconds: float,
    limits: Limits | None = None,
) -> None:
    """Serve until the ranks have stopped or failed.

    Args:
        connection: Socket to the first rank.
        listener: Socket that clients connect to.
        settings: Choices of the user.
        max_waiting: Maximum number of requests that wait, in addition to running ones.
        drain_seconds: Time to finish running requests after the first signal to stop.
        limits: Limits of each client.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # launchers send them to all processes; the ranks decide
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    uvloop.run(_serve(connection, listener, settings, max_waiting, drain_seconds, limits or Limits()))


async def _serve(
    connection: socket.socket,
    listener: socket.socket,
    settings: Settings,
    max_waiting: int,
    drain_seconds: float,
    limits: Limits,
) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    engine = Engine(reader, writer, max_waiting, Metrics())
    config = uvicorn.Config(
        Api(engine, settings, limits).app(),
        http=partial(Connection, limits=limits, request_timeout=settings.request_timeout),  # type: ignore[arg-type]
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
