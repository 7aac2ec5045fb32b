"""The prompts that a decode server's HTTP process gives to prefill servers (`Prefills`)."""

import asyncio
import logging
from collections.abc import Sequence
from hashlib import sha256
from uuid import uuid4

import httpx2
import numpy as np

from dcpmla.serving.client import Engine
from dcpmla.serving.messages import First, Lose, Pull, Wanted
from dcpmla.serving.prefill_server import PrefillServer, RefusedPromptError

_BEGINNING = 256  # tokens of a prompt that decide which server has probably cached them
_SPARE = 4  # open prompts by which the server of a beginning may exceed the least busy one
_CONNECT_SECONDS = 5.0
_logger = logging.getLogger(__name__)


class Prefills:
    """Requests that wait for other servers' prefills.

    A request goes to another server after a failure, once to each; then this server computes it.

    Args:
        urls: Prefill servers.
        engine: Engine of this server.
        key: Key of this server and of the prefill servers (`Settings.server_key`); None for none.
        transport: Transport of HTTP in place of the network; None for that.
    """

    def __init__(
        self, urls: Sequence[str], engine: Engine, key: str | None, transport: httpx2.AsyncBaseTransport | None = None
    ) -> None:
        headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
        # A prefill may take any time. Each waits on a connection of its own, so connections have no limit, either.
        timeout = httpx2.Timeout(None, connect=_CONNECT_SECONDS)
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
        self._client = httpx2.AsyncClient(headers=headers, timeout=timeout, limits=limits, transport=transport)
        self._engine = engine
        self.servers = [PrefillServer(url.rstrip("/"), self._client, engine) for url in urls]
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._tried: dict[int, list[str]] = {}  # servers of each open request that was wanted, the latest one last
        engine.on_wanted, engine.on_end = self._want, self._forget

    async def run(self) -> None:
        """Watch the servers until this is cancelled."""
        try:
            await asyncio.gather(*(server.watch() for server in self.servers))
        finally:
            for task in self._tasks.values():
                task.cancel()
            await self._client.aclose()

    def secret_of(self, engine: str) -> str | None:
        """Return the secret of the connected prefill server whose job has this name; None without one."""
        return next((server.secret for server in self.servers if server.engine == engine), None)

    def choose(self, request: Wanted) -> PrefillServer | None:
        """Choose a server for a request. Prompts with the same beginning have the same server, unless it is busier.

        Returns:
            None if no server is left that is ready and was not tried.
        """
        tried = self._tried.get(request.request_id, ())
        ready = [server for server in self.servers if server.is_ready and server.url not in tried]
        if not ready:
            return None
        beginning = np.asarray(request.prompt_token_ids[:_BEGINNING], dtype="<i4").tobytes()
        key = sha256(request.cache_salt.encode(errors="backslashreplace") + b"\0" + beginning).digest()
        # The rank of a server does not depend on the others, so most beginnings keep theirs when one is lost.
        preferred = max(ready, key=lambda server: sha256(key + server.url.encode()).digest())
        least = min(ready, key=lambda server: server.num_open)
        return preferred if preferred.num_open <= 2 * least.num_open + _SPARE else least

    def _want(self, request: Wanted) -> None:
        """Give a request to a server; a second time, its transfer from the previous one has failed."""
        request_id = request.request_id
        if not self._engine.is_open(request_id):
            return
        if (task := self._tasks.pop(request_id, None)) is not None:
            task.cancel()
        server = self.choose(request)
        if server is None:
            self._engine.metrics.computed_here()
            self._engine.outbox.send(Lose(request_id, is_local=True))
            return
        self._tried.setdefault(request_id, []).append(server.url)
        self._tasks[request_id] = asyncio.create_task(self._prefill(server, request))

    async def _prefill(self, server: PrefillServer, request: Wanted) -> None:
        request_id, handoff = request.request_id, uuid4().hex
        self._engine.outbox.send(Pull(request_id, server.engine, handoff))
        try:
            token = await server.prefill(request, handoff)
        except RefusedPromptError as error:
            self._engine.refuse(request_id, f"prefill server {server.url}: {error}")
        except ConnectionError as error:
            _logger.warning("prefill server %s does not compute a prompt: %s", server.url, error)
            self._engine.outbox.send(Lose(request_id, is_local=False))
        else:
            self._engine.outbox.send(First(request_id, token))

    def _forget(self, request_id: int) -> None:
        """Stop a request's prefill: closing its connection aborts it on the server."""
        self._tried.pop(request_id, None)
        task = self._tasks.pop(request_id, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()
