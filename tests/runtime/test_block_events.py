"""Events of remembered blocks: whoever follows them has the keys that a search finds, in their chains."""

import random
from collections.abc import Iterable
from pathlib import Path

import pytest

from dcpmla.cache.block_events import GPU, HOST, BlockEvent, Cleared, Removed, Stored
from dcpmla.cache.blocks import BlockAllocator, block_key, salt_key
from dcpmla.cache.host import HostMemory
from dcpmla.runtime.block_events import record_events, stored_events, take_events
from dcpmla.runtime.request import Request
from dcpmla.runtime.sampling import SamplingParams
from tests.support.hash_model import BLOCK, make_engine
from tests.support.late_disk import threaded_disk


def follow(known: set[bytes], events: Iterable[BlockEvent]) -> None:
    """Apply events to the keys that are known, and compute the keys of stored blocks anew from their tokens."""
    for event in events:
        match event:
            case Stored(keys, previous, token_ids, cache_salt, _):
                assert keys
                assert len(token_ids) == BLOCK * len(keys)
                assert previous is None or previous in known
                chained = salt_key(cache_salt) if previous is None else previous
                for index, key in enumerate(keys):
                    assert key not in known, "a block has two events"
                    chained = block_key(chained, token_ids[index * BLOCK : (index + 1) * BLOCK])
                    assert chained == key
                    known.add(key)
            case Removed(key, _):
                known.remove(key)
            case Cleared():
                known.clear()


def no_disk(memory: HostMemory) -> None:
    """Open none."""


@pytest.mark.parametrize(("num_host_blocks", "has_disk"), [(7, False), (400, False), (30, True)])
def test_events_of_host_memory_lead_to_what_it_has(num_host_blocks: int, has_disk: bool, tmp_path: Path) -> None:
    """Conversations that come back after the cache has lost them, over a host memory that holds some or all of them.
    Blocks that host memory has read from a disk have an event once a request has used them.
    """
    open_disk = threaded_disk(tmp_path, 40) if has_disk else no_disk
    engine = make_engine(12, max_num_seqs=4, num_host_blocks=num_host_blocks, open_disk=open_disk)
    rng = random.Random(7)
    scheduler = engine.scheduler
    record_events(engine.allocator, scheduler.tier)
    known: dict[str, set[bytes]] = {GPU: set(), HOST: set()}
    beginnings = [[rng.randrange(28) for _ in range(5 * BLOCK)] for _ in range(5)]
    num_removed = 0
    for _ in range(40):
        content = [*rng.choice(beginnings), *rng.choices(range(28), k=rng.randrange(1, 9))]
        params = SamplingParams(max_new_tokens=rng.randrange(1, 2 * BLOCK), ignore_eos=True)
        request = engine.add(engine.prompt(content, rng.choice(["", "a"])), params)
        while engine.has_requests:
            next(engine.run(), None)
            for event in take_events(engine.allocator, scheduler.tier):
                assert not isinstance(event, Cleared)
                if event.medium == GPU:
                    follow(known[GPU], [event])
                elif isinstance(event, Removed):
                    known[HOST].remove(event.key)
                    num_removed += 1
                else:
                    (key,) = event.keys
                    before = salt_key(event.cache_salt) if event.previous is None else event.previous
                    assert block_key(before, event.token_ids) == key
                    assert key not in known[HOST]
                    known[HOST].add(key)
            assert known[GPU] == engine.allocator._by_key.keys()
            assert known[HOST] <= {*scheduler.tier.blocks}
            assert has_disk or known[HOST] == {*scheduler.tier.blocks}
        own = request.block_keys(0, len(request.prompt_token_ids) // BLOCK, BLOCK)
        assert {*own} & {*scheduler.tier.blocks} <= known[HOST]
    assert known[HOST] - known[GPU], "blocks that the cache has lost"
    assert (num_removed > 10) == (num_host_blocks < 400)
    engine.reset()
    events = take_events(engine.allocator, scheduler.tier)
    assert events[-1] == Cleared()
    assert {event.key for event in events[:-1] if isinstance(event, Removed)} == known[HOST]
    engine.close()


@pytest.mark.parametrize("num_blocks", [12, 30, 200])
def test_events_lead_to_what_is_found(num_blocks: int) -> None:
    """Prompts that share beginnings, with and without salts, answers that end anywhere, preemptions, evictions."""
    engine, known, rng = make_engine(num_blocks, max_num_seqs=4), set[bytes](), random.Random(5)
    engine.allocator.events = []
    beginnings = [[rng.randrange(28) for _ in range(3 * BLOCK)] for _ in range(3)]
    num_kinds = dict.fromkeys((Stored, Removed), 0)
    for _ in range(12):
        for _ in range(5):
            content = [
                *rng.choice(beginnings)[: rng.randrange(4 * BLOCK)],
                *rng.choices(range(28), k=rng.randrange(1, 9)),
            ]
            params = SamplingParams(max_new_tokens=rng.randrange(1, 3 * BLOCK), ignore_eos=True)
            engine.add(engine.prompt(content, rng.choice(["", "", "a"])), params)
        while engine.has_requests:
            next(engine.run(), None)
            events = engine.allocator.take_events()
            follow(known, events)
            for kind in num_kinds:
                num_kinds[kind] += sum(isinstance(event, kind) for event in events)
            assert known == engine.allocator._by_key.keys()
    assert num_kinds[Stored] > 10
    assert (num_kinds[Removed] > 10) == (num_blocks < 200)
    engine.reset()
    assert engine.allocator.take_events() == [Cleared()]


def test_blocks_that_are_computed_twice_have_one_event() -> None:
    """Answers to the same short prompt are the same, and no request waits for another one's answer."""
    engine, known = make_engine(100), set[bytes]()
    engine.allocator.events = []
    params = SamplingParams(max_new_tokens=3 * BLOCK, ignore_eos=True)
    requests = [engine.add([1, 2], params) for _ in range(2)]
    list(engine.run())
    assert requests[0].token_ids == requests[1].token_ids
    follow(known, engine.allocator.take_events())
    assert known == set(requests[0].block_keys(0, 3, BLOCK))


def test_neighbours_share_an_event() -> None:
    request = Request(list(range(5 * BLOCK)), SamplingParams())
    keys = request.block_keys(0, 5, BLOCK)
    first, second = stored_events(request, [0, 2, 3], BLOCK)
    assert first == Stored(keys[:1], None, list(range(BLOCK)))
    assert second == Stored(keys[2:4], keys[1], list(range(2 * BLOCK, 4 * BLOCK)))


def test_blocks_that_another_request_has_stored_part_the_others() -> None:
    """The second request finds two blocks of the first, and stores its own third one."""
    engine = make_engine(100)
    engine.allocator.events = []
    same = list(range(2 * BLOCK))
    for last in (1, 2):
        request = engine.add([*same, *[last] * BLOCK, 3], SamplingParams(max_new_tokens=1))
        list(engine.run())
        assert request.finish_reason
    first, second = engine.allocator.take_events()
    assert isinstance(first, Stored)
    assert isinstance(second, Stored)
    assert (len(first.keys), len(second.keys)) == (3, 1)
    assert second.previous == first.keys[1]
    assert second.token_ids == [2] * BLOCK


def test_new_tokens_with_forms_have_no_event() -> None:
    """A prompt with the same tokens does not find their blocks."""
    engine = make_engine(200, deterministic=True, max_model_len=400)
    engine.allocator.events = []
    prompt = list(range(2 * BLOCK))
    request = engine.add([*prompt, 1], SamplingParams(max_new_tokens=4 * BLOCK, ignore_eos=True))
    list(engine.run())
    events = engine.allocator.take_events()
    known = set[bytes]()
    follow(known, events)
    assert len(engine.allocator._by_key) > len(known) == 2
    assert request.block_keys(0, 2, BLOCK) == [
        key for event in events if isinstance(event, Stored) for key in event.keys
    ]


def test_nothing_is_kept_where_nobody_takes_it() -> None:
    allocator = BlockAllocator(2, BLOCK)
    allocator.remember(allocator.allocate(1)[0], b"a")
    allocator.reset()
    assert allocator.events is None
