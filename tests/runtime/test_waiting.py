"""The order of prompts that wait or run, and what it does for conversations that the cache cannot hold together."""

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from dcpmla.cache.blocks import BlockAllocator
from dcpmla.runtime.request import Request
from dcpmla.runtime.sampling import SamplingParams
from dcpmla.runtime.scheduler import Scheduler
from dcpmla.runtime.waiting import Precedence
from tests.runtime.test_scheduler import collect, compute

BLOCK = 4


def request_of(tokens: list[int], arrival_time: float = 0.0, name: int = 0) -> Request:
    params = SamplingParams(max_new_tokens=2, ignore_eos=True)
    return Request(tokens, params, request_id=name, arrival_time=arrival_time)


def scheduler_of(num_blocks: int, max_num_batched_tokens: int = 8, max_num_seqs: int = 2) -> Scheduler:
    return Scheduler(BlockAllocator(num_blocks, BLOCK), max_num_batched_tokens, max_num_seqs)


def remember(scheduler: Scheduler, tokens: list[int], num_blocks: int) -> None:
    """Let the cache have the first blocks of a prompt."""
    keys = request_of(tokens).block_keys(0, num_blocks, BLOCK)
    blocks = scheduler.allocator.allocate(num_blocks)
    for block, key in zip(blocks, keys, strict=True):
        scheduler.allocator.remember(block, key)
    scheduler.allocator.free(blocks)


def order(precedence: Precedence, requests: list[Request]) -> list[str | int]:
    waiting = deque(requests)
    precedence.arrange(waiting)
    return [request.request_id for request in waiting]


def precedence_of(scheduler: Scheduler) -> Precedence:
    return Precedence(scheduler.reuse, scheduler.max_num_batched_tokens)


def test_prompts_that_lack_little_pass_others_by_as_many_tokens_as_these_have() -> None:
    scheduler = scheduler_of(100)
    prompts = [[100 * number + index for index in range(6 * BLOCK + 1)] for number in range(5)]
    for number, num_blocks in ((1, 3), (2, 4), (3, 6)):
        remember(scheduler, prompts[number], num_blocks)
    requests = [request_of(prompt, number, number) for number, prompt in enumerate(prompts)]
    precedence = precedence_of(scheduler)
    assert order(precedence, requests) == [3, 2, 0, 1, 4]  # one with half of its blocks is like one without
    precedence.count(request_of([7] * 4), 24, us=1.0)
    precedence.settle(others_run=False)
    assert order(precedence, requests) == [3, 2, 0, 1, 4]
    precedence.count(request_of([7] * 4), 1, us=1.0)
    precedence.settle(others_run=False)
    assert order(precedence, requests) == [0, 2, 3, 1, 4]  # of each kind, the oldest is due
    requests[4].scheduled_time = 10.0  # it was preempted
    assert order(precedence, requests) == [4, 0, 2, 3, 1]
    assert order(precedence, [requests[3]]) == [3]
    precedence.settle(others_run=False)  # nothing else waits
    assert order(precedence, requests[:4]) == [3, 2, 0, 1]


def test_some_requests_are_looked_at_in_a_step() -> None:
    scheduler = scheduler_of(100)
    prompts = [[100 * number + index for index in range(6 * BLOCK + 1)] for number in range(2)]
    remember(scheduler, prompts[0], 6)
    requests = [request_of(prompts[number % 2], 0.0, number) for number in range(100)]
    passed = order(precedence_of(scheduler), requests)
    assert passed[64:] == [*range(64, 100)]
    assert passed[:32] == [*range(0, 64, 2)]


def test_without_reuse_and_for_scored_prompts_the_order_is_that_of_arrival() -> None:
    scheduler = scheduler_of(100)
    prompt = [*range(6 * BLOCK + 1)]
    remember(scheduler, prompt, 6)
    scored = SamplingParams(max_new_tokens=2, prompt_logprobs=0)
    requests = [request_of([7] * 13, 0.0, 0), Request(prompt, scored, request_id=1), request_of([8] * 13, 2.0, 2)]
    assert order(precedence_of(scheduler), requests) == [0, 1, 2]
    assert order(precedence_of(scheduler), [*requests, request_of([9] * 4, 3.0, 3)]) == [3, 0, 1, 2]  # a short one
    scheduler.reuse.is_enabled = False
    assert order(precedence_of(scheduler), [request_of([7] * 13, 0.0, 0), request_of(prompt, 1.0, 1)]) == [0, 1]


def pieces_of(scheduler: Scheduler, arriving: Callable[[int], list[Request]], num_steps: int) -> list[dict[int, int]]:
    """Return the tokens that each step computes of each request, by its name."""
    steps = []
    for number in range(num_steps):
        for request in arriving(number):
            scheduler.reuse.add(request)
            scheduler.add(request)
        batch = scheduler.schedule(float(number))
        steps.append({int(piece.request.request_id): piece.num_tokens for piece in batch.pieces})
        collect(scheduler, compute(scheduler, batch))
    return steps


def test_a_turn_is_computed_beside_a_long_prompt() -> None:
    """It has its context in the cache, and does not wait for the prompt that came before it."""
    scheduler = scheduler_of(400, max_num_batched_tokens=32, max_num_seqs=8)
    context = [*range(100 * BLOCK)]
    remember(scheduler, context, 100)
    requests = {0: [request_of([7] * 200, 0.0, 1)], 2: [request_of([*context, 5, 6], 2.0, 2)]}
    steps = pieces_of(scheduler, lambda number: requests.get(number, []), 8)
    assert steps[:4] == [{1: 32}, {1: 32}, {2: 2, 1: 30}, {2: 1, 1: 31}]


def test_a_long_prompt_has_half_of_the_work() -> None:
    """Short prompts that fill each step pass it by as many tokens as it has; then it has every second step."""
    scheduler = scheduler_of(2000, max_num_batched_tokens=32, max_num_seqs=64)
    short = SamplingParams(max_new_tokens=1)

    def arriving(number: int) -> list[Request]:
        stream = [Request([number, index] * 8, short, 10 + 2 * number + index, number) for index in range(2)]
        return [*stream, *([request_of([7] * 160, 1.0, 1)] if number == 1 else [])]

    steps = pieces_of(scheduler, arriving, 30)
    computed = [step.get(1, 0) for step in steps]
    assert computed[:6] == [0] * 6  # 160 tokens of others, from its arrival on
    assert computed[6:15] == [32, 0, 32, 0, 32, 0, 32, 0, 32]


def cached_share(num_sessions: int, num_turns: int) -> float:
    """Return the share of prompt tokens that turns of conversations find in a cache for four of them. Each asks again
    as soon as it is answered; steps take a second.
    """
    scheduler = scheduler_of(num_blocks=4 * 20, max_num_batched_tokens=16)
    contexts = [[1000 * number + index for index in range(15 * BLOCK)] for number in range(num_sessions)]
    open_requests, num_prompt, num_cached, now = dict[Request, int](), 0, 0, 0.0

    def ask(number: int) -> None:
        request = request_of([*contexts[number], 5], now)
        scheduler.reuse.add(request)
        scheduler.add(request)
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
    for num_sessions in (6, 12, 40):
        assert cached_share(num_sessions, num_turns=600) > 0.9
    in_order: Callable[..., Any] = lambda *_: 0  # noqa: E731
    monkeypatch.setattr(Precedence, "arrange", in_order)
    assert cached_share(3, num_turns=300) > 0.9
    assert cached_share(6, num_turns=300) < 0.3
