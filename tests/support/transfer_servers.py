"""HTTP applications of prefill and decode servers in this process, over lists of commands in place of ranks."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

import httpx2

from dcpmla.runtime.request import TokenLogprobs
from dcpmla.runtime.sampling import SamplingParams
from dcpmla.serving.app import Api
from dcpmla.serving.background import Prepared, prepare
from dcpmla.serving.client import Engine
from dcpmla.serving.connections import Limits
from dcpmla.serving.messages import Connect, Output, Report, Started, Submit, unpack_commands
from dcpmla.serving.metrics import Metrics
from dcpmla.serving.outbox import Outbox
from dcpmla.serving.prefills import Prefills
from dcpmla.serving.settings import Settings
from dcpmla.serving.worker import Worker
from dcpmla.transfer.layout import CacheLayout, TokenSpec
from tests.support.servers import KEY

PROMPT = [5, 6, 7]
# What a router adds to its request to a prefill server.
ASK = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
FIRST = TokenLogprobs(7, -0.5, ((7, -0.5), (8, float("-inf"))))


def layout(row_bytes: int = 64, facts: tuple[tuple[str, str], ...] = (("dtype (--dtype)", "bf16"),)) -> CacheLayout:
    return CacheLayout(1, 1, 1, (TokenSpec("latents", 0, row_bytes, 16, 1, False),), (), facts)


def job(engine: str, own: CacheLayout | None = None) -> Connect:
    return Connect(engine, own or layout(), [bytes(3)])


def prefill_body(**changes: Any) -> dict[str, Any]:
    """Return what decode server d sends for a prompt."""
    params = asdict(SamplingParams(max_new_tokens=9, seed=(1 << 64) - 1, temperature=0.5, logprobs=1))
    return {"handoff": "h", "engine": "d", "prompt_token_ids": PROMPT, "params": params, **changes}


class Ranks:
    """A server's ranks: the commands that they get, and answers to them.

    Args:
        engine: Name of the server's job; empty for a server that exchanges no blocks.
        answers: Whether prompts get a token at once.
    """

    def __init__(self, engine: str, answers: bool = True) -> None:
        self.commands: list[Any] = []
        self.answers = answers
        stream: Any = self
        self.engine = Engine(stream, Outbox(stream), 8, Metrics())
        self.started = Started("", 1000, 500, 8, 4000, link=job(engine) if engine else None)
        self.engine.prepared = Prepared(self.started, None, "there is none")
        self.engine._last = float("inf")  # The ranks run.

    def write(self, packed: bytes) -> None:
        for command in unpack_commands(packed):
            self.commands.append(command)
            if isinstance(command, Submit) and self.answers:
                self.answer(command)

    def answer(self, command: Submit) -> None:
        """Give each choice of a prompt its token."""
        logprobs = () if command.params.logprobs is None else (FIRST,)
        outputs = [Output(each, "a", (FIRST.token_id,), logprobs, "length") for each in command.request_ids]
        report = Report(outputs, 0, 0, 0, 0.0, {})
        asyncio.get_running_loop().call_soon(lambda: self.engine._hand_out(report))

    def of(self, kind: type[Any]) -> list[Any]:
        """Return the commands of a kind."""
        return [command for command in self.commands if isinstance(command, kind)]

    async def wait_for(self, kind: type[Any], number: int = 1) -> Any:
        """Return a command of a kind, once there are so many."""
        await until(lambda: len(self.of(kind)) >= number)
        return self.of(kind)[number - 1]

    def app(
        self, role: str, prefills: Prefills | None = None, transfer_key: str | None = None, worker: Any = None
    ) -> Any:
        settings = Settings(name="model", api_key=KEY, request_timeout=600, role=role, transfer_key=transfer_key)
        return Api(self.engine, settings, Limits(), worker or Worker(prepare), prefills).app()


class Network(httpx2.AsyncBaseTransport):
    """Applications by host; a host without one refuses connections, one that is frozen never answers."""

    def __init__(self, **apps: Any) -> None:
        self.apps: dict[str, Any] = apps
        self.frozen: set[str] = set()
        self.paths: list[tuple[str, str]] = []

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        host = request.url.host
        self.paths.append((host, request.url.path))
        if host in self.frozen:
            seconds = request.extensions["timeout"]["read"]
            await asyncio.sleep(1e6 if seconds is None else seconds)
            raise httpx2.ReadTimeout("no answer")
        if host not in self.apps:
            raise httpx2.ConnectError("nobody listens")
        if isinstance(self.apps[host], httpx2.Response):
            return self.apps[host]
        return await httpx2.ASGITransport(self.apps[host]).handle_async_request(request)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


def client(app: Any, key: str = KEY) -> httpx2.AsyncClient:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://server:81", headers=headers)


async def connect(http: httpx2.AsyncClient, engine: str = "d", **changes: Any) -> httpx2.Response:
    """Connect a decode server to the prefill server of a client."""
    return await http.post("/kv/connect", json={**job(engine).json_fields(), **changes})


@asynccontextmanager
async def connected(ranks: Ranks, worker: Any = None) -> AsyncIterator[httpx2.AsyncClient]:
    """Yield a client of a prefill server to which decode server d is connected."""
    async with client(ranks.app("prefill", worker=worker)) as http:
        assert (await connect(http)).status_code == 200
        yield http
