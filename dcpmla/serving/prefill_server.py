"""A prefill server as a decode server's HTTP process knows it (`PrefillServer`)."""

import asyncio
import logging
import time
from typing import Any

import httpx2
import msgspec

from dcpmla.runtime.request import TokenLogprobs
from dcpmla.serving.client import Engine
from dcpmla.serving.messages import Connect, Disconnect, Wanted

LOST = 15.0  # seconds without an answer of /health after which a server counts as lost
_PERIOD = 3.0  # seconds between two questions for its health
_FINAL = (400, 413, 422)  # statuses of a prompt that no server would take
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
        self._connecting = asyncio.Lock()
        self._lost = asyncio.Event()  # the connected job is lost
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
            "prompt_token_ids": request.prompt_token_ids,
            "params": request.params,
            "cache_salt": request.cache_salt or None,
        }
        content = msgspec.json.encode(body)
        answer = asyncio.ensure_future(self._ask(content))
        tasks: list[asyncio.Future[Any]] = [answer, asyncio.ensure_future(self._lost.wait())]
        self.num_open += 1
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise ConnectionError("the server is lost")
            return msgspec.convert(answer.result()["token"], TokenLogprobs)
        except (httpx2.HTTPError, KeyError, TypeError, ValueError) as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
        finally:
            self.num_open -= 1
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, content: bytes) -> dict[str, Any]:
        """Return the JSON object of a prompt's answer; raise what an error means."""
        answer = await self._client.post(f"{self.url}/kv/prefill", content=content)
        if answer.status_code in _FINAL:
            raise RefusedPromptError(_reason(answer))
        if answer.status_code == 409:  # it has started again, or has dropped this server
            self._lose("it does not know this server; connecting again")
            raise ConnectionError(_reason(answer))
        if answer.status_code != 200:
            raise ConnectionError(f"status {answer.status_code}: {_reason(answer)}")
        fields: dict[str, Any] = answer.json()
        return fields

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
        self.engine, self.secret, self._lost = other.engine, secret, asyncio.Event()
        self._here.outbox.send(other)
        self._say("connected")

    def _lose(self, reason: str) -> None:
        """Forget the server's job, and fail its prompts."""
        self._is_healthy = False
        self._say(reason)
        if self.engine:
            self._here.outbox.send(Disconnect(self.engine))
            self.engine = ""
            self._lost.set()

    def _say(self, words: str) -> None:
        """Log a change once."""
        if words != self._said:
            self._said = words
            _logger.warning("prefill server %s: %s", self.url, words)


def _reason(answer: httpx2.Response) -> str:
    """Return the message of an answer that is an error."""
    try:
        return str(answer.json()["error"]["message"])
    except (KeyError, TypeError, ValueError):
        return answer.text[:200]
