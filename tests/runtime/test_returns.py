"""Conversations that come back to contexts in the cache, and prompts that wait for them."""

from random import Random

import pytest

from dcpmla.cache.blocks import BlockAllocator
from dcpmla.runtime.costs import TokenCosts
from dcpmla.runtime.request import Request
from dcpmla.runtime.returns import Returns
from dcpmla.runtime.sampling import SamplingParams
from dcpmla.runtime.scheduler import Scheduler
from tests.runtime.test_scheduler import collect, compute

BLOCK = 4


class Costs(TokenCosts):
    """Costs of equal tokens, a hundredth of a second each."""

    def piece_us(self, num_tokens: int, context: int) -> float:
        return 1e4 * num_tokens


def keys_of(number: int, num_blocks: int) -> list[bytes]:
    return [b"%d %d" % (number, index) for index in range(num_blocks)]


def remember(allocator: BlockAllocator, keys: list[bytes]) -> None:
    blocks = allocator.allocate(len(keys))
    for block, key in zip(blocks, keys, strict=True):
        allocator.remember(block, key)
    allocator.free(blocks)


def test_contexts_that_come_back_are_expected_as_long_as_most_took() -> None:
    allocator = BlockAllocator(100, BLOCK)
    returns = Returns(allocator)
    for number in range(20):  # 10 come back after 1 to 10 s, with another block
        keys = keys_of(number, 10)
        returns.leave(keys, 0.0)
        if number < 10:
            returns.come([*keys, b"next"], number + 1.0)
    assert returns.further_work == pytest.approx(1.0)  # 1/2 + 1/4 + ...
    assert returns.num_expected(0.0) == 0  # the cache has none of them
    for number in (15, 17):
        remember(allocator, keys_of(number, 10))
    returns.leave(keys_of(17, 10), 20.0)
    assert [returns.num_expected(now) for now in (10.0, 10.5, 25.0, 30.5)] == [20, 10, 10, 0]
    allocator.allocate(100)
    assert returns.num_expected(25.0) == 0


def test_nothing_is_expected_before_the_cache_was_filled_once() -> None:
    returns = Returns(BlockAllocator(100, BLOCK))
    for number in range(9):
        returns.leave(keys_of(number, 10), 0.0)
        returns.come(keys_of(number, 10), 1.0)
    assert returns.further_work == 0.0
    returns.leave([], 0.0)
    returns.come([], 1.0)
    returns.leave(keys_of(9, 10), 0.0)
    assert returns.further_work == pytest.approx(9.0)
    returns.come(keys_of(9, 10), 1.0)
    assert returns.further_work == pytest.approx(10.0)  # all came back


def test_older_requests_weigh_less_and_few_are_remembered() -> None:
    returns = Returns(BlockAllocator(10, BLOCK))
    for number in range(100):
        returns.leave(keys_of(number, 10), 0.0)
        returns.come(keys_of(number, 10), 1.0)
    for number in range(5000):
        returns.leave(keys_of(number, 10), 2.0)
    assert returns.further_work < 1e-3
    returns.come(keys_of(0, 10), 3.0)  # too many have left since
    assert returns.further_work < 1e-3


def run_sessions(num_sessions: int, num_turns: int, comes_back: bool = True) -> list[float]:
    """Return the share of tokens found, and of steps without a piece while requests wait, of conversations in a cache
    for four. Each pauses for some steps between its turns, or another one begins then.
    """
    scheduler = Scheduler(BlockAllocator(4 * 40, BLOCK), 32, 16, costs=Costs())
    random, serials = Random(0), iter(range(1, 1 << 30))
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    due = {number: float(number) for number in range(num_sessions)}
    serial_of = {number: next(serials) for number in due}
    asked, num_prompt, num_cached, num_idle, num_steps, now = dict[Request, int](), 0, 0, 0, 0, 0.0
    while num_turns > 0:
        now, num_steps = now + 1.0, num_steps + 1
        for number in [number for number, at in due.items() if at <= now]:
            del due[number]
            tokens = [1000 * serial_of[number] + index for index in range(36 * BLOCK)]
            request = Request(tokens, params, arrival_time=now)
            scheduler.reuse.add(request)
            scheduler.add(request)
            asked[request] = number
        batch = scheduler.schedule(now, agreed_now=now)
        num_idle += bool(scheduler.waiting) and not batch.pieces
        collect(scheduler, compute(scheduler, batch))
        for request in [request for request in asked if request.finish_reason]:
            num_prompt += len(request.prompt_token_ids)
            num_cached += request.num_cached_tokens
            num_turns -= 1
            number = asked.pop(request)
            due[number] = now + random.randint(1, 8)
            serial_of[number] = serial_of[number] if comes_back else next(serials)
    return [num_cached / num_prompt, num_idle / num_steps]


def test_conversations_that_pause_keep_their_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missed prompt waits while others run, and no step is empty for it."""
    found, idle = run_sessions(6, 600)
    fits, _ = run_sessions(3, 300)
    once, _ = run_sessions(6, 300, comes_back=False)
    monkeypatch.setattr(Scheduler, "_lets_others_return", lambda *_: False)
    assert (fits, _) == tuple(run_sessions(3, 300))
    assert once == run_sessions(6, 300, comes_back=False)[0] == 0.0
    assert idle == 0.0
    assert found > run_sessions(6, 600)[0] + 0.1
