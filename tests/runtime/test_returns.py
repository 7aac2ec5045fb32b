"""Conversations that come back to contexts in the cache, and prompts that wait for them."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dcpmla.runtime.scheduler as scheduler_module
from dcpmla.cache.blocks import BlockAllocator
from dcpmla.parallel.mesh import init_mesh
from dcpmla.runtime.costs import TokenCosts
from dcpmla.runtime.request import Request
from dcpmla.runtime.returns import Returns
from dcpmla.runtime.sampling import SamplingParams
from dcpmla.runtime.scheduler import Scheduler
from tests.runtime.test_scheduler import collect, compute
from tests.support.engine_loads import Load, check_empty, loads, serve
from tests.support.hash_model import HashDrafter, alone, make_engine
from tests.support.ranks import run_ranks

BLOCK = 4


class Costs(TokenCosts):
    """Costs of equal tokens, a hundredth of a second each by default."""

    def __init__(self, token_us: float = 1e4) -> None:
        self._token_us = token_us

    def piece_us(self, num_tokens: int, context: int) -> float:
        return self._token_us * num_tokens


def keys_of(number: int, num_blocks: int) -> list[bytes]:
    return [b"%d %d" % (number, index) for index in range(num_blocks)]


def remember(allocator: BlockAllocator, keys: list[bytes]) -> None:
    blocks = allocator.allocate(len(keys))
    for block, key in zip(blocks, keys, strict=True):
        allocator.remember(block, key)
    allocator.free(blocks)


def with_one_waiting(allocator: BlockAllocator) -> Returns:
    """Return a record of a share b of busy time with b^2 / (1 - b) = 1, so that the loss is the work of evictions."""
    returns, share = Returns(allocator), (5**0.5 - 1) / 2
    returns.begin_step(0.0, False)
    returns.begin_step(60 * share / (1 - share), True)
    return returns


def test_contexts_that_come_back_are_expected_as_long_as_most_took() -> None:
    allocator = BlockAllocator(100, BLOCK)
    returns = with_one_waiting(allocator)
    for number in range(20):  # 10 come back after 1 to 10 s, with another block
        keys = keys_of(number, 10)
        returns.leave(keys, 0.0)
        if number < 10:
            returns.come([*keys, b"next"], number + 1.0)
    assert returns.delay == pytest.approx(1.0)  # 1/2 + 1/4 + ...
    assert returns.num_expected(0.0) == 0  # the cache has none of them
    for number in (15, 17):
        remember(allocator, keys_of(number, 10))
    returns.leave(keys_of(17, 10), 20.0)
    assert [returns.num_expected(now) for now in (10.0, 10.5, 25.0, 30.5)] == [20, 10, 10, 0]
    allocator.allocate(100)
    assert returns.num_expected(25.0) == 0


def test_nothing_is_expected_before_the_cache_was_filled_once() -> None:
    returns = with_one_waiting(BlockAllocator(100, BLOCK))
    for number in range(9):
        returns.leave(keys_of(number, 10), 0.0)
        returns.come(keys_of(number, 10), 1.0)
    assert returns.delay == 0.0
    returns.leave([], 0.0)
    returns.come([], 1.0)
    returns.leave(keys_of(9, 10), 0.0)
    assert returns.delay == pytest.approx(9.0)
    returns.come(keys_of(9, 10), 1.0)
    assert returns.delay == pytest.approx(10.0)  # all came back


def test_samples_of_a_prompt_leave_one_context() -> None:
    returns = with_one_waiting(BlockAllocator(40, BLOCK))
    for number in range(4):
        for _ in range(3):
            returns.leave(keys_of(number, 10), 0.0)
        for _ in range(3):
            returns.come(keys_of(number, 10), 1.0)
        returns.leave(keys_of(number + 10, 10), 1.0)
    assert returns.delay == pytest.approx(1.0)


def test_evictions_cost_nothing_where_prompts_are_rare() -> None:
    """One more prompt delays others in proportion to the share of the time in which prompts are computed."""
    returns = Returns(BlockAllocator(10, BLOCK))
    for number in range(2):
        returns.leave(keys_of(number, 10), 0.0)
    returns.come(keys_of(0, 10), 1.0)
    assert returns.delay == 0.0
    delays, now = list[float](), 0.0
    for is_busy in (True, True, False, True):
        for _ in range(600):
            now += 0.1
            returns.begin_step(now, is_busy)
        delays.append(returns.delay)
    assert 0.5 < delays[0] < delays[1]
    assert delays[2] < 0.3 < delays[3] < delays[1]
    returns.begin_step(0.0, True)  # a clock that was set back
    assert returns.delay == delays[3]


def test_older_requests_weigh_less_and_few_are_remembered() -> None:
    returns = with_one_waiting(BlockAllocator(10, BLOCK))
    for number in range(100):
        returns.leave(keys_of(number, 10), 0.0)
        returns.come(keys_of(number, 10), 1.0)
    for number in range(5000):
        returns.leave(keys_of(number + 100, 10), 2.0)
    assert returns.delay < 1e-3
    returns.come(keys_of(100, 10), 3.0)  # too many have left since
    assert returns.delay < 1e-3


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


class AnyReturns(Returns):
    """Returns that may say anything at any time, as those of any past could."""

    random = Random(0)

    def num_expected(self, now: float) -> int:
        return self.random.randrange(2 * self._allocator.num_blocks)

    @property
    def delay(self) -> float:
        return self.random.choice([0.0, 10.0])


@given(load=loads(most=12, longest=30, latest=30, aborts=True), seed=st.integers(0, 99), drafts=st.booleans())
def test_requests_get_their_tokens_whatever_waits(load: Load, seed: int, drafts: bool) -> None:
    """Under preemption and aborts."""
    drafter = HashDrafter(2, 0.5, seed) if drafts else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler_module, "Returns", AnyReturns)
        patch.setattr(AnyReturns, "random", Random(seed))
        engine = make_engine(*load.limits, costs=Costs(1e12), drafter=drafter)
        serve(engine, load)
        check_empty(engine)


def serve_turns(num_ranks: int) -> tuple[int, list[int]]:
    """On one rank: serve turns of conversations that do not fit together; return how often a prompt waited for others,
    and how many tokens were found of each turn's prompt, in the order of their ends.
    """
    mesh = init_mesh(num_ranks, 1)
    engine = make_engine(30, max_num_batched_tokens=16, max_num_seqs=4, mesh=mesh, costs=Costs(1e12))
    random, num_waits, found = Random(0), 0, list[int]()
    texts = [[random.randrange(28) for _ in range(30)] for _ in range(6)]
    asked, due = dict[Request, int](), dict.fromkeys(range(len(texts)), 0)
    lets_others_return = engine.scheduler._lets_others_return

    def count(request: Request) -> bool:
        nonlocal num_waits
        waits = lets_others_return(request)
        num_waits += waits
        return waits

    engine.scheduler._lets_others_return = count  # type: ignore[method-assign]
    for step in range(160):
        for number in [number for number, at in due.items() if at <= step]:
            del due[number]
            asked[engine.add(texts[number], SamplingParams(max_new_tokens=3))] = number
        engine.step()
        for request in [request for request in asked if request.finish_reason]:
            number = asked.pop(request)
            assert request.token_ids == alone(request.prompt_token_ids, 3)
            found.append(request.num_cached_tokens)
            texts[number] = [*texts[number], *request.token_ids, 7][:60]
            due[number] = step + random.randint(1, 5)
    list(engine.run())
    assert engine.allocator.num_free == 30
    engine.restart_clock()
    assert engine.scheduler._returns.num_expected(0.0) == 0
    return num_waits, found


def test_ranks_let_the_same_prompts_wait() -> None:
    """Their clocks differ, and they decide by the first one's."""
    first, *others = run_ranks(3, serve_turns, 3)
    assert others == [first, first]
    num_waits, found = first
    assert num_waits > 10
    assert len(found) > 30
    assert any(found)
