"""The HTTP process: server and engine's client on one event loop, until the ranks end."""

import asyncio
import gc
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import uvicorn
import uvloop

from dcpmla.integrations.tokenizer import silence_transformers
from dcpmla.serving.app import Api
from dcpmla.serving.background import prepare
from dcpmla.serving.client import Engine
from dcpmla.serving.connections import Connection, Limits, limit_connections
from dcpmla.serving.few_lines import FewLines
from dcpmla.serving.messages import BEAT
from dcpmla.serving.metrics import Metrics
from dcpmla.serving.outbox import Outbox
from dcpmla.serving.prefills import Prefills
from dcpmla.serving.request_log import RequestLog
from dcpmla.serving.settings import Settings
from dcpmla.serving.throughput import Throughput
from dcpmla.serving.worker import Worker

_FLUSH = 3  # Seconds for the remaining answers at the end.
_BEAT = 5.0  # Seconds between two signs of life for the first rank, which waits 60.
_LOAD_SECONDS = 10.0  # between two lines on the server's load

_logger = logging.getLogger(__name__)


class _Server(uvicorn.Server):
    """uvicorn without signals: the first rank says when to stop."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve_http(
    connection: socket.socket,
    listener: socket.socket,
    settings: Settings,
    limits: Limits | None = None,
) -> None:
    """Serve until the ranks have stopped or failed.

    Args:
        connection: Socket to the first rank.
        listener: Socket that clients connect to.
        settings: Options of the server.
        limits: Limits of each client.
    """
    gc.collect()
    gc.freeze()  # Otherwise a garbage collection scans every import, and no client is answered for 0.15 s.
    limits = limit_connections(limits or Limits())
    silence_transformers()
    worker = Worker(prepare)
    worker.start()  # Later this process has threads, which a fork does not copy.
    uvloop.run(_serve(connection, listener, settings, limits, worker))


async def _serve(
    connection: socket.socket,
    listener: socket.socket,
    settings: Settings,
    limits: Limits,
    worker: Worker,
) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    engine = Engine(reader, Outbox(writer), settings.max_waiting, Metrics(settings.metrics_names, settings.name))
    engine.on_ready = partial(_show_address, listener)
    tasks = [asyncio.create_task(engine.finish(settings.drain_seconds)), asyncio.create_task(_beat(writer))]
    prefills = None
    if settings.prefill_servers:
        prefills = Prefills(settings.prefill_servers, engine, settings.server_key)
        tasks.append(asyncio.create_task(prefills.run()))
    few, app = FewLines(), Api(engine, settings, limits, worker, prefills).app()
    tasks.append(asyncio.create_task(_say(Throughput(engine.metrics), few)))
    config = uvicorn.Config(
        app if settings.disable_access_log else RequestLog(app, few),
        http=partial(Connection, limits=limits, request_timeout=settings.request_timeout),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_FLUSH,
    )
    logging.getLogger("uvicorn.error").addFilter(few)
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await engine.listen()
    finally:
        for task in tasks:
            task.cancel()
        server.should_exit = True
        await serving


def _show_address(listener: socket.socket) -> None:
    """Print the server's address. The model is loaded by then, so clients may wait for this line."""
    host, port, *_ = listener.getsockname()
    print(f"serving on http://[{host}]:{port}" if ":" in host else f"serving on http://{host}:{port}", flush=True)


async def _beat(writer: asyncio.StreamWriter) -> None:
    """Show the first rank that this process is neither stopped nor stuck."""
    while True:
        writer.write(BEAT)
        await asyncio.sleep(_BEAT)


async def _say(throughput: Throughput, few: FewLines) -> None:
    """Log the server's load while it is busy, and the numbers of lines that are left out."""
    while True:
        await asyncio.sleep(_LOAD_SECONDS)
        if line := throughput.line():
            _logger.info(line)
        few.tell()
