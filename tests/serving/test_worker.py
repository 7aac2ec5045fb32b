"""The process that works for the HTTP process: functions in children, with limits, which end with their callers."""

import asyncio
import gc
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from dcpmla.extras import missing
from dcpmla.serving import worker
from dcpmla.serving.background import Prepared, prepare
from dcpmla.serving.messages import Started
from dcpmla.serving.worker import Allowance, LimitError, Worker
from tests.support.small_tokenizers import tokenizer_of


def prepared(model: str) -> str:
    return model.upper()


def joined(model: str, number: int, text: str) -> list[Any]:
    return [model, number, text]


def parent(model: str) -> int:
    return os.getppid()


def spin(model: str) -> None:
    while True:
        pass


def fill(model: str) -> None:
    bytearray(2 * worker.Allowance.num_bytes)


def write_much(model: str) -> str:
    return "x" * worker.Allowance.answer_bytes


def fail(model: str) -> None:
    raise KeyError("a mistake")


def sleep(model: str, path: str) -> None:
    Path(path).write_text(str(os.getpid()))
    time.sleep(600)


def shape(prepared: Prepared, text: str) -> list[Any]:
    threads, token_ids = os.listdir(f"/proc/{os.getppid()}/task"), prepared.tokenizer.encode(text)
    return [len(threads), token_ids, prepared.no_tokenizer, prepared.vocabulary is not None]


async def test_a_worker_loads_its_own_tokenizer_and_has_no_threads(tmp_path: Path) -> None:
    """Its children are forks of it, and threads would not be in them."""
    tokenizer = tokenizer_of("straddling")  # It is not trained: that takes threads, too.
    tokenizer.save_pretrained(tmp_path)
    own, has_grammars = Worker(prepare), not missing("structured")
    for text in ("a b", "é"):
        shaped = await own.call(Started(str(tmp_path), len(tokenizer), 9, 9, 9), shape, text)
        assert shaped == [1, tokenizer.encode(text), "", has_grammars]


def measure(model: str, sizes: Mapping[str, int], texts: Sequence[str], allowance: Allowance) -> list[Any]:
    return [sizes["a"], list(texts), allowance.num_bytes]


async def test_arguments_have_their_types() -> None:
    """Integers of any size, dataclasses, and texts that look like other things."""
    values: list[Any] = [{"a": 1 << 70}, ["null", "\x00é🦊"], Allowance(num_bytes=5)]
    wrong: list[list[Any]] = [[*values[:2], {"num_bytes": "5"}], values[:2], [*values, 1], [{"a": "1"}, *values[1:]]]
    own = Worker(prepared)
    assert await own.call("m", measure, *values) == [1 << 70, ["null", "\x00é🦊"], 5]
    for args in wrong:
        with pytest.raises(LimitError):
            await own.call("m", measure, *args)


@pytest.mark.parametrize("function", [spin, fill, write_much, fail])
async def test_limits_end_a_function_and_nothing_else(function: Any, capfd: pytest.CaptureFixture[str]) -> None:
    own = Worker(prepared)
    with pytest.raises(LimitError):
        await own.call("m", function)
    assert await own.call("m", joined, 1, "") == ["M", 1, ""]
    assert ("KeyError: 'a mistake'" in capfd.readouterr().err) == (function is fail)


async def test_another_process_follows_one_that_was_killed() -> None:
    own = Worker(prepared)
    first = await own.call("m", parent)
    os.kill(first, signal.SIGKILL)
    while Path(f"/proc/{first}/stat").read_text().split(")")[1].split()[0] != "Z":
        await asyncio.sleep(0.01)
    assert await own.call("m", parent) != first
    assert await own.call("m", joined, 1, "") == ["M", 1, ""]


async def test_functions_end_with_their_callers(tmp_path: Path) -> None:
    """Otherwise those of clients that have left would keep others waiting. One client never has all permits."""
    own, num_permits = Worker(prepared), worker.MAX_CHILDREN - 1
    paths = [tmp_path / str(number) for number in range(worker.MAX_CHILDREN + 2)]
    tasks = [asyncio.create_task(own.call("m", sleep, str(path))) for path in paths]
    while not all(path.exists() and path.read_text() for path in paths[:num_permits]):
        await asyncio.sleep(0.01)
    worker.CLIENT.set("another")
    assert await own.call("m", joined, 1, "") == ["M", 1, ""]
    for task in tasks:
        task.cancel()
    worker.CLIENT.set("")
    answers = await asyncio.gather(*(own.call("m", joined, number, "é") for number in range(5)))
    assert answers == [["M", number, "é"] for number in range(5)]
    pids = [int(path.read_text()) for path in paths if path.exists()]
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        await asyncio.sleep(0.01)
    assert len(pids) == num_permits


async def test_permits_are_given_in_the_order_of_arrival() -> None:
    """Where the first one that waits may take none, the next one may."""
    permits, order, ends = worker.Permits(3), list[str](), {name: asyncio.Event() for name in "abc"}

    async def hold(client: str) -> None:
        worker.CLIENT.set(client)
        give_back = await permits.take()
        order.append(client)
        try:
            await ends[client].wait()
        finally:
            give_back()

    tasks = [asyncio.create_task(hold(client)) for client in ("a", "a", "a", "b", "a", "c")]
    await asyncio.sleep(0)
    assert order == ["a", "a", "b"]
    tasks[2].cancel()
    ends["b"].set()
    await asyncio.sleep(0.01)
    assert order == ["a", "a", "b", "c"]
    ends["a"].set()
    ends["c"].set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == ["a", "a", "b", "c", "a"]
    assert not permits._all.locked()
    del tasks
    await asyncio.sleep(0)
    gc.collect()
    assert not permits._of_clients
