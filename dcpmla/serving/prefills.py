"""The prompts that a decode server's HTTP process gives to prefill servers: `Prefills`, over a `PrefillServer` each."""

import asyncio
import logging
import time
from collections.abc import Sequence
from hashlib import sha256
from uuid import uuid4

import httpx2
import msgspec

from dcpmla.runtime.request import TokenLogprobs
from dcpmla.serving.client import Engine
from dcpmla.serving.messages import Connect, Disconnect, First, Lose, Pull, Wanted, pack_tokens, unpack_tokens

LOST = 15.0  # seconds without an answer of /health after which a server counts as lost
_PERIOD = 3.0  # seconds between two questions for its health
_CONNECT_SECONDS = 5.0
_FINAL = (400, 413, 422)  # statuses of a prompt that no server would take
_BEGINNING = 256  # tokens of a prompt that decide which server has probably cached them
_SPARE = 4  # open prompts by which the server of a beginning may exceed the least busy one
_logger = logging.getLogger(__name__)


class RefusedPromptError(Exception):
    """A prefill server's reason for which no server computes a prompt."""


class PrefillServer:
    """The connection to one prefill server.

    Args:
        url: Address of the server.
        client: HTTP client with the servers' key.
        engine: This job, whose ranks connect to the server's job after each of its starts.
    Attributes:
        engine: Name of the server's job; empty while it is not connected.
        secret: Secret of the server's proofs (`proof_of`), while it is connected.
        num_open: Prompts that it computes for this server.
    """

    def __init__(self, url: str, client: httpx2.AsyncClient, engine: Engine) -> None:
        self.url, self.engine, self.secret, self.num_open = url, "", "", 0
        self._client, self._here = client, engine
        self._is_healthy = False
        self._waits = set[asyncio.Timeout]()  # of the prompts that it computes
        self._said = ""  # the latest line in the log

    @property
    def is_ready(self) -> bool:
        """Return whether the server takes prompts."""
        return bool(self.engine) and self._is_healthy

    async def watch(self) -> None:
        """Ask the server for its health without end, and connect to it whenever it has started."""
        answered = time.monotonic()
        while True:
            try:
                answer = await self._client.get(f"{self.url}/health", timeout=LOST)
                answered, self._is_healthy = time.monotonic(), answer.status_code == 200
                if self._is_healthy and not self.engine:
                    await self._connect()
            except httpx2.ConnectError as error:  # no program listens there
                self._lose(f"it cannot be reached: {error}")
            except httpx2.HTTPError as error:
                self._is_healthy = False
                if time.monotonic() - answered >= LOST:
                    self._lose(f"it has not answered /health for {LOST:.0f} s ({type(error).__name__})")
            except Exception:  # an answer that makes no sense must not end the watch
                _logger.exception("prefill server %s", self.url)
            await asyncio.sleep(_PERIOD)

    async def prefill(self, request: Wanted, handoff: str) -> TokenLogprobs:
        """Let the server compute a prompt; return its first token.

        Raises:
            RefusedPromptError: No server would take the prompt.
            ConnectionError: This server does not compute it.
        """
        own = self._here.link
        assert own is not None
        body = {
            "handoff": handoff,
            "engine": own.engine,
            "prompt_token_ids": unpack_tokens(request.prompt).tolist(),
            "params": request.params,
            "cache_salt": request.cache_salt or None,
        }
        self.num_open += 1
        try:
            async with asyncio.timeout(None) as wait:  # it ends when the server is lost
                self._waits.add(wait)
                return await self._ask(msgspec.json.encode(body))
        except TimeoutError as error:
            raise ConnectionError("the server is lost") from error
        except (httpx2.HTTPError, KeyError, TypeError, ValueError) as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
        finally:
            self.num_open -= 1
            self._waits.discard(wait)

    async def _ask(self, content: bytes) -> TokenLogprobs:
        """Return the first token of a prompt; raise what an error means."""
        answer = await self._client.post(f"{self.url}/kv/prefill", content=content)
        if answer.status_code in _FINAL:
            raise RefusedPromptError(_reason(answer))
        if answer.status_code == 409:  # it has started again, or has dropped this server
            self._lose("it does not know this server; connecting again")
            raise ConnectionError(_reason(answer))
        if answer.status_code != 200:
            raise ConnectionError(f"status {answer.status_code}: {_reason(answer)}")
        return msgspec.convert(answer.json()["token"], TokenLogprobs)

    async def _connect(self) -> None:
        """Exchange layouts and agents with the server's job."""
        own = self._here.link
        if own is None:
            return
        answer = await self._client.post(f"{self.url}/kv/connect", json=own.json_fields(), timeout=LOST)
        if answer.status_code != 200:
            self._say(f"status {answer.status_code} of /kv/connect: {_reason(answer)}")
            return
        try:
            content = answer.json()
            secret, other = str(content.pop("secret")), Connect.of(content)
            other.layout.check_matches(own.layout)
        except (KeyError, TypeError, ValueError) as error:
            self._say(f"its answer of /kv/connect is wrong: {error}")
            return
        self.engine, self.secret = other.engine, secret
        self._here.outbox.send(other)
        self._say("connected")

    def _lose(self, reason: str) -> None:
        """Forget the server's job, and fail its prompts."""
        self._is_healthy = False
        self._say(reason)
        if self.engine:
            self._here.outbox.send(Disconnect(self.engine))
            self.engine = ""
            while self._waits:
                self._waits.pop().reschedule(0)

    def _say(self, words: str) -> None:
        """Log a change once."""
        if words != self._said:
            self._said = words
            _logger.warning("prefill server %s: %s", self.url, words)


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
        beginning = pack_tokens(unpack_tokens(request.prompt)[:_BEGINNING])
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
            self._engine.metrics.count("kv_transfer_local_prefills")
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


def _reason(answer: httpx2.Response) -> str:
    """Return the message of an answer that is an error."""
    try:
        return str(answer.json()["error"]["message"])
    except (KeyError, TypeError, ValueError):
        return answer.text[:200]
