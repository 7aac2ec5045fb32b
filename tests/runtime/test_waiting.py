"""The order of waiting requests, and what it does for conversations that the cache cannot hold together."""

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

import dcpmla.runtime.scheduler as scheduler_module
import dcpmla.runtime.waiting as waiting_module
from dcpmla.cache.blocks import BlockAllocator
from dcpmla.runtime.request import Request
from dcpmla.runtime.sampling import SamplingParams
from dcpmla.runtime.scheduler import Scheduler
from dcpmla.runtime.waiting import put_cached_first
from tests.runtime.test_scheduler import collect, compute

BLOCK = 4


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of a few blocks are long."""
    monkeypatch.setattr(waiting_module, "_SHORT_TOKENS", 3 * BLOCK)


def request_of(tokens: list[int], arrival_time: float = 0.0, name: int = 0) -> Request:
    params = SamplingParams(max_new_tokens=2, ignore_eos=True)
    return Request(tokens, params, request_id=name, arrival_time=arrival_time)


def scheduler_of(num_blocks: int, max_num_batched_tokens: int = 64) -> Scheduler:
    return Scheduler(BlockAllocator(num_blocks, BLOCK), max_num_batched_tokens, max_num_seqs=2)


def remember(scheduler: Scheduler, tokens: list[int], num_blocks: int) -> None:
    """Let the cache have the first blocks of a prompt."""
    keys = request_of(tokens).block_keys(0, num_blocks, BLOCK)
    blocks = scheduler.allocator.allocate(num_blocks)
    for block, key in zip(blocks, keys, strict=True):
        scheduler.allocator.remember(block, key)
    scheduler.allocator.free(blocks)


def order(scheduler: Scheduler, requests: list[Request], now: float = 50.0) -> list[str | int]:
    waiting = deque(requests)
    put_cached_first(waiting, scheduler.reuse, now)
    return [request.request_id for request in waiting]


def test_cached_prompts_pass_others_until_these_have_waited_long() -> None:
    scheduler = scheduler_of(100)
    prompts = [[100 * number + index for index in range(6 * BLOCK + 1)] for number in range(5)]
    for number, num_blocks in ((1, 3), (2, 4), (3, 6)):
        remember(scheduler, prompts[number], num_blocks)
    requests = [request_of(prompt, number, number) for number, prompt in enumerate(prompts)]
    assert order(scheduler, requests) == [2, 3, 0, 1, 4]  # one with half of its blocks is like one without
    assert order(scheduler, requests, now=120.5) == [0, 2, 3, 1, 4]
    assert order(scheduler, requests, now=200.0) == [0, 1, 2, 3, 4]
    requests[4].scheduled_time = 10.0  # it was preempted
    assert order(scheduler, [requests[4], *requests[:4]]) == [4, 2, 3, 0, 1]
    requests = [request_of(prompts[number % 2 + 3], 0.0, number) for number in range(100)]
    passed = order(scheduler, requests)
    assert passed[64:] == [*range(64, 100)]  # so many are looked at
    assert passed[:32] == [*range(0, 64, 2)]


def test_without_reuse_and_for_scored_prompts_the_order_is_that_of_arrival() -> None:
    scheduler = scheduler_of(100)
    prompt = [*range(6 * BLOCK + 1)]
    remember(scheduler, prompt, 6)
    scored = SamplingParams(max_new_tokens=2, prompt_logprobs=0)
    requests = [request_of([7] * 13, 0.0, 0), Request(prompt, scored, request_id=1), request_of([8] * 13, 2.0, 2)]
    assert order(scheduler, requests) == [0, 1, 2]
    assert order(scheduler, [*requests, request_of([9] * 12, 3.0, 3)]) == [3, 0, 1, 2]  # a short one passes
    scheduler.reuse.is_enabled = False
    assert order(scheduler, [request_of([7] * 13, 0.0, 0), request_of(prompt, 1.0, 1)]) == [0, 1]


def cached_share(num_sessions: int, num_turns: int) -> float:
    """Return the share of prompt tokens that turns of conversations find in a cache for four of them. Each asks again
    as soon as it is answered; steps take a second.
    """
    scheduler = scheduler_of(num_blocks=4 * 20, max_num_batched_tokens=32)
    contexts = [[1000 * number + index for index in range(15 * BLOCK)] for number in range(num_sessions)]
    open_requests, num_prompt, num_cached, now = dict[Request, int](), 0, 0, 0.0

    def ask(number: int) -> None:
        request = request_of([*contexts[number], 5], now)
        scheduler.reuse.add(request)
        scheduler.waiting.append(request)
        open_requests[request] = number

    for number in range(num_sessions):
        ask(number)
    while num_turns > 0:
        now += 1.0
        collect(scheduler, compute(scheduler, scheduler.schedule(now, agreed_now=now)))
        for request in [request for request in open_requests if request.finish_reason]:
            num_prompt += len(request.prompt_token_ids)
            num_cached += request.num_cached_tokens
            num_turns -= 1
            ask(open_requests.pop(request))
    return num_cached / num_prompt


def test_more_conversations_than_fit_do_not_evict_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of arrival each finds little or nothing, because all others were served since its last turn."""
    assert cached_share(3, num_turns=300) > 0.9
    assert cached_share(6, num_turns=300) > 0.5
    in_order: Callable[..., Any] = lambda *_: None  # noqa: E731
    monkeypatch.setattr(scheduler_module, "put_cached_first", in_order)
    assert cached_share(3, num_turns=300) > 0.9
    assert cached_share(6, num_turns=300) < 0.3
