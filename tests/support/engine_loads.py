"""Random loads of an engine over the hash model: prompts that begin alike, arrive in any step and may be aborted."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from random import Random
from typing import NamedTuple

from hypothesis import strategies as st

from dcpmla.runtime.engine import Engine
from dcpmla.runtime.request import Request
from dcpmla.runtime.sampling import SamplingParams
from tests.support.hash_model import BLOCK, EOS, alone
from tests.support.waiting import wait_until


class Ask(NamedTuple):
    """A request, the step in which it arrives, and after how many more steps it is aborted, if at all."""

    prompt: list[int]
    num_new: int
    arrival: int = 0
    abort: int | None = None


@dataclass(frozen=True)
class Load:
    """Requests, and the limits of their engine, which has room for the largest of them at least."""

    asks: list[Ask]
    num_blocks: int
    max_num_batched_tokens: int
    max_num_seqs: int

    @property
    def limits(self) -> tuple[int, int, int]:
        return self.num_blocks, self.max_num_batched_tokens, self.max_num_seqs


def draw_load(
    rng: Random,
    least: int = 1,
    most: int = 9,
    longest: int = 14,
    latest: int = 12,
    num_new: int = 14,
    aborts: bool = False,
) -> Load:
    """Draw a load.

    Args:
        least, most: Smallest and largest number of requests.
        longest: Largest number of tokens of a beginning that prompts share.
        latest: Last step in which a request arrives.
        num_new: Largest number of new tokens.
        aborts: Whether every other request is aborted.
    """

    def tokens(least: int, most: int) -> list[int]:
        return [rng.randrange(EOS) for _ in range(rng.randint(least, most))]

    beginnings = [tokens(0, longest) for _ in range(rng.randint(1, 4))]
    ends, asks = [tokens(1, 9) for _ in range(2)], list[Ask]()
    for _ in range(rng.randint(least, most)):
        abort = rng.choice([None, None, None, None, 0, 1, 3, 10]) if aborts else None
        end = rng.choice(ends) if rng.choice([True, False, False]) else tokens(1, 9)  # Some prompts are the same.
        asks.append(Ask(rng.choice(beginnings) + end, rng.randint(1, num_new), rng.randint(0, latest), abort))
    largest = max(-(-(len(ask.prompt) + ask.num_new - 1) // BLOCK) for ask in asks)
    # From no room for a second request on.
    return Load(asks, largest + rng.randint(0, 8), rng.choice([1, 3, 7, 64]), rng.choice([1, 2, 16]))


def loads(**sizes: int) -> st.SearchStrategy[Load]:
    """Return a strategy of loads (`draw_load`)."""
    return st.randoms(use_true_random=False).map(partial(draw_load, **sizes))


def serve(
    engine: Engine,
    load: Load,
    step: Callable[[], object] | None = None,
    expected: Callable[[list[int], int], list[int]] = alone,
) -> list[Request]:
    """Serve a load, and check that each request gets the tokens that it gets alone, or the first of them if it is
    aborted.

    Args:
        step: A step of the engine and what belongs to it; None for the engine's own.
        expected: Function that returns the tokens of a prompt alone.
    """
    requests: dict[int, Request] = {}
    for num_steps in count():
        for index, ask in enumerate(load.asks):
            if ask.arrival == num_steps:
                params = SamplingParams(max_new_tokens=ask.num_new)
                requests[index] = engine.add(ask.prompt, params, request_id=index)
            if ask.abort is not None and ask.arrival + ask.abort == num_steps:
                engine.abort(requests[index])
        if len(requests) == len(load.asks) and all(request.finish_reason for request in requests.values()):
            break
        (step or engine.step)()
    for index, ask in enumerate(load.asks):
        request, tokens = requests[index], expected(ask.prompt, ask.num_new)
        if request.finish_reason == "abort":
            tokens = tokens[: len(request.token_ids)]
        else:
            assert request.finish_reason == ("stop" if tokens[-1] == EOS else "length")
        assert request.token_ids == tokens, (index, request.num_preemptions)
    return [requests[index] for index in range(len(load.asks))]


def settle(engine: Engine) -> None:
    """Step until all transfers have ended, and with a disk, until host memory has all blocks, from where they go on."""
    tier = engine.scheduler.tier

    def is_settled() -> bool:
        engine.step()
        return engine._agreement.progress.is_empty and not (tier.disk.blocks.num_slots and tier.num_pending)

    wait_until(is_settled, "transfers do not end", pause=0)


def check_empty(engine: Engine) -> None:
    """Check that no block is held, and each slot of host memory and of the disk has at most one key."""
    settle(engine)
    assert engine.allocator.num_free == engine.allocator.num_blocks
    tier, reads = engine.scheduler.tier, engine.scheduler.reads
    for table in (tier.blocks, tier.states, tier.disk.blocks, tier.disk.states):
        assert sorted([*table._slots.values(), *table._free]) == list(range(table.num_slots))
        assert not table._holders
    assert reads is None or not any([reads.queue, reads._readings, reads._awaited, reads._coming])
