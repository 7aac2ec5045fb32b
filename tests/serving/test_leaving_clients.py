"""Clients that leave while their requests are tokenized, rendered or checked: the work ends, nothing stays counted."""

import asyncio
import itertools
import json
import threading
from typing import Any

import pytest

from dcpmla.serving import background as background_module
from dcpmla.serving import receive
from dcpmla.serving.app import Api
from dcpmla.serving.background import Background, Prepared, prepare
from dcpmla.serving.client import Engine
from dcpmla.serving.messages import Started
from dcpmla.serving.worker import CLIENT, Allowance, Worker
from tests.serving.test_client import make_api, make_engine
from tests.support.agent import TEMPLATE, WEATHER
from tests.support.asgi import Client
from tests.support.small_tokenizers import scripted_tokenizer

pytestmark = pytest.mark.usefixtures("_short_texts_are_long")

LONG = "word " * 20_000
USER = [{"role": "user", "content": LONG}]
SHORT = [{"role": "user", "content": "a"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
STRICT = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
FLAT = {"type": "function", "strict": True, **WEATHER["function"]}
# Bodies whose work is long: a text, tokens, a conversation, a grammar, calls.
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": LONG}),
    ("/v1/completions", {"prompt": [5] * 70_000, "echo": True}),
    ("/v1/completions", {"prompt": [5], "structured_outputs": {"json": SCHEMA}}),
    ("/v1/chat/completions", {"messages": USER}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 500}] * 3000}),
    ("/v1/chat/completions", {"messages": SHORT, "tools": [STRICT]}),
    (
        "/v1/chat/completions",
        {"messages": SHORT, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    ),
    ("/v1/responses", {"input": LONG}),
    ("/v1/responses", {"input": "a", "tools": [FLAT], "tool_choice": "required"}),
    ("/v1/messages", {"messages": USER, "max_tokens": 5}),
    ("/v1/messages/count_tokens", {"messages": USER}),
    ("/tokenize", {"prompt": LONG}),
    ("/tokenize", {"messages": USER}),
    ("/detokenize", {"tokens": [5] * 70_000}),
]


class Slow(Worker):
    """A process whose functions never end by themselves."""

    num_called = num_ended = 0

    async def call(self, *args: Any, **kwargs: Any) -> Any:
        self.num_called += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.num_ended += 1


def slow_api() -> tuple[Engine, Slow, Api]:
    engine, _ = make_engine(max_num_seqs=2)  # with a queue of one more
    tokenizer = scripted_tokenizer(TEMPLATE)
    model = Started("", len(tokenizer), 500_000, 2, 500_000, eos_token_ids=(1,))
    engine.prepared = Prepared(model, tokenizer)
    worker = Slow(prepare)
    return engine, worker, make_api(engine, worker)


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_work_ends_with_its_client(path: str, body: dict[str, Any]) -> None:
    engine, worker, api = slow_api()
    packed = json.dumps(body).encode()
    client = Client(api.app(), path, packed)
    while not worker.num_called:
        assert not client.task.done(), client.status
        await asyncio.sleep(0)
    assert (engine._num_prepared, api._receiver._num_bytes) == (1, len(packed))
    await client.leave()
    assert worker.num_called == worker.num_ended == 1
    assert (engine._num_prepared, api._receiver._num_bytes, len(engine._open)) == (0, 0, 0)
    assert client.status == 499
    assert len(asyncio.all_tasks()) == 1


async def test_requests_count_before_they_are_submitted() -> None:
    """The queue has room for three; the fourth is refused, and served once another client has left."""
    engine, worker, api = slow_api()
    app, body = api.app(), json.dumps({"prompt": LONG}).encode()
    clients = [Client(app, "/v1/completions", body) for _ in range(3)]
    while worker.num_called < 3:
        await asyncio.sleep(0)
    fourth = Client(app, "/tokenize", body)
    await fourth.task
    assert fourth.status == 429
    fifth = Client(app, "/v1/completions", body)
    await asyncio.sleep(0)
    await clients[0].leave()  # while the fifth one waits a moment
    while worker.num_called < 4:
        assert not fifth.task.done()
        await asyncio.sleep(0.01)
    for client in (*clients[1:], fifth):
        await client.leave()
    assert engine._num_prepared == 0


def blocked(prepared: Any, started: threading.Semaphore, end: threading.Event) -> None:
    started.release()
    end.wait()


async def test_threads_keep_their_permits_to_the_end() -> None:
    """A client that leaves and comes again gets no more of them, and never all."""
    background = Background(Prepared(Started("", 9, 9, 1, 9), None), Slow(prepare))
    started, end, num_threads = threading.Semaphore(0), threading.Event(), background_module._NUM_THREADS
    permits = background._permits

    def work(client: str, num: int) -> list[asyncio.Task[Any]]:
        CLIENT.set(client)
        run = background.run
        return [asyncio.create_task(run(1, Allowance(), blocked, started, end)) for _ in range(num)]

    first = work("a", num_threads + 5)
    for _ in range(num_threads - 1):
        await asyncio.to_thread(started.acquire)
    for task in first:
        task.cancel()
    await asyncio.gather(*first, return_exceptions=True)
    again, other = work("a", 3), work("b", 1)
    await asyncio.to_thread(started.acquire)  # the other client's
    assert permits._all.locked()
    assert [permits._of_clients[client].locked() for client in "ab"] == [True, False]
    end.set()
    await asyncio.gather(*again, *other)
    while permits._all._value < num_threads:  # The threads' ends come one by one.
        await asyncio.sleep(0.001)


async def test_other_clients_are_answered_between_large_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight clients send large bodies at once: between any two that are parsed, a small one is."""
    parsed: list[int] = []
    parse = receive.parse

    def counting(kind: Any, content: bytearray) -> Any:
        parsed.append(len(content))
        return parse(kind, content)

    monkeypatch.setattr(receive, "parse", counting)
    engine, _, api = slow_api()
    engine.max_waiting = 100
    app, large = api.app(), json.dumps({"prompt": LONG}).encode()
    clients = [Client(app, "/v1/completions", large) for _ in range(8)]
    while sum(size > len(LONG) for size in parsed) < 8:
        small = Client(app, "/tokenize", b'{"prompt": 1}')
        await small.task
        assert small.status == 400
    for client in clients:
        await client.leave()
    places = [index for index, size in enumerate(parsed) if size > len(LONG)]
    assert all(after - before > 1 for before, after in itertools.pairwise(places))
