"""Prompts that begin alike and arrive together: one computes the beginning, the others find it. What is reused and
loaded of a prompt, step by step.
"""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpmla.cache.blocks import BlockAllocator, block_key, salt_key
from dcpmla.cache.tier import HostTier
from dcpmla.runtime import reuse as reuse_module
from dcpmla.runtime.costs import LoadCosts
from dcpmla.runtime.engine import Engine
from dcpmla.runtime.request import Request
from dcpmla.runtime.reuse import Forks, Found, PrefixReuse
from dcpmla.runtime.sampling import SamplingParams
from dcpmla.runtime.scheduler import Scheduler
from tests.support.hash_model import BLOCK, HashModel, alone, answer, make_engine

BEGINNING = [(7 * i + 3) % 28 for i in range(5 * BLOCK)]


def add_all(engine: Engine, prompts: Sequence[list[int]]) -> list[Request]:
    return [engine.add(prompt, SamplingParams(max_new_tokens=3)) for prompt in prompts]


def check_tokens(requests: Sequence[Request]) -> None:
    assert [request.token_ids for request in requests] == [alone(request.prompt_token_ids, 3) for request in requests]


def test_a_beginning_is_computed_once() -> None:
    model = HashModel()
    engine = make_engine(200, model=model)
    requests = answer(engine, *([*BEGINNING, number, number + 1] for number in range(6)))
    assert [request.num_cached_tokens for request in requests] == [0] + 5 * [len(BEGINNING)]
    assert model.steps[:2] == [[len(BEGINNING) + 2], [1] + 5 * [2]]  # one, then its decode and the others' ends


def test_chunks_are_waited_for_as_far_as_they_are_shared() -> None:
    """Of two that wait, one shares a block of the first chunk, the other one of the second, too."""
    engine = make_engine(200, max_num_batched_tokens=18)
    whole, first = [*BEGINNING, 1], [*BEGINNING[:BLOCK], *6 * [28]]
    requests = answer(engine, [*BEGINNING, 2], whole, first)
    assert [request.num_cached_tokens for request in requests] == [0, len(BEGINNING), BLOCK]
    times = [request.scheduled_time for request in requests]
    assert times[0] < times[2] < times[1]  # type: ignore[operator]


def test_salts_part_requests() -> None:
    """Blocks of prompts and of answers; no salt is the key without one."""
    engine = make_engine(200)
    num_cached = []
    for salt in ("", "a", "b", "a", ""):
        request = engine.add(engine.prompt([*BEGINNING, 1], salt), SamplingParams(max_new_tokens=9, ignore_eos=True))
        list(engine.run())
        again = engine.add(engine.prompt([*BEGINNING, 1, *request.token_ids[:-1]], salt))
        list(engine.run())
        num_cached.append((request.num_cached_tokens, again.num_cached_tokens - len(BEGINNING)))
    assert [num for num, _ in num_cached] == [0, 0, 0, len(BEGINNING), len(BEGINNING)]
    assert {num for _, num in num_cached} == {2 * BLOCK}
    (key,) = Request(list(range(BLOCK)), SamplingParams()).block_keys(0, 1, BLOCK)
    assert key == block_key(b"", range(BLOCK))


def test_salts_part_states() -> None:
    scheduler = Scheduler(BlockAllocator(100, BLOCK, 8), 100, 4)
    found = []
    for own in ("", "a", "b"):
        request = Request([*BEGINNING, 1], SamplingParams(max_new_tokens=1), cache_salt=own)
        scheduler.waiting.append(request)
        for _ in range(5):  # pieces end where the number of blocks has doubled
            for piece in scheduler.schedule(0.0).pieces:
                piece.request.num_computed_tokens += piece.num_tokens
                scheduler.reuse.remember(piece.request)
        scheduler.remove(request)
    for own in ("", "a", "b", "c"):
        request = Request([*BEGINNING, 1], SamplingParams(max_new_tokens=1), cache_salt=own)
        found.append(scheduler.allocator.with_state(scheduler.allocator.find(request.block_keys(0, 5, BLOCK))))
    assert [len(blocks) for blocks, _ in found] == [5, 5, 5, 0]
    assert len({state for _, state in found}) == 4


def test_a_salt_is_no_key_of_a_block() -> None:
    """Not even a salt that is made of a block's tokens."""
    tokens = [0x61] * BLOCK
    salt = b"".join(token.to_bytes(8, "little") for token in tokens).decode()
    assert salt_key("") == b""
    assert len({salt_key(salt), block_key(b"", tokens), salt_key("a"), salt_key("\ud800")}) == 4


def test_requests_share_a_prompt() -> None:
    engine = make_engine(200)
    prompt = engine.prompt([*BEGINNING, 1])
    requests = [engine.add(prompt, SamplingParams(max_new_tokens=9, ignore_eos=True)) for _ in range(3)]
    list(engine.run())
    assert len({id(request.prompt_token_ids) for request in requests}) == 1
    assert len({id(request.prompt_keys) for request in requests}) == 1
    assert len(prompt.block_keys) == len(BEGINNING) // BLOCK
    with pytest.raises(ValueError, match="cache_salt is 5; it must be text"):
        engine.prompt([1], 5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompts", "salts", "first"),
    [
        (
            [[*BEGINNING, 1], [*BEGINNING, 2], [5] * 9, [5] * 9, [*BEGINNING[: BLOCK - 1], 9, 9]],
            "aaaaa",
            [len(BEGINNING) + 1, 9, BLOCK + 1],
        ),
        (3 * [[*BEGINNING, 1]], "aba", 2 * [len(BEGINNING) + 1]),
    ],
)
def test_only_prompts_that_share_blocks_wait(prompts: list[list[int]], salts: str, first: list[int]) -> None:
    model = HashModel()
    engine = make_engine(200, model=model)
    for prompt, salt in zip(prompts, salts, strict=True):
        engine.add(engine.prompt(prompt, salt))
    engine.step()
    assert model.steps[0] == first


def test_who_computes_may_end_before() -> None:
    """The next one takes its part, and the third finds what both have computed."""
    engine = make_engine(200, max_num_batched_tokens=7)
    requests = add_all(engine, [[*BEGINNING, number] for number in range(3)])
    engine.step()
    engine.abort(requests[0])
    list(engine.run())
    check_tokens(requests[1:])
    assert 0 < requests[1].num_cached_tokens < len(BEGINNING) == requests[2].num_cached_tokens


def test_nobody_waits_without_prefix_caching_or_for_scores() -> None:
    model = HashModel()
    engine = make_engine(200, model=model)
    params = SamplingParams(max_new_tokens=1, prompt_logprobs=0)
    for _ in range(2):
        engine.add(list(BEGINNING), params)
    list(engine.run())
    assert model.steps == [2 * [len(BEGINNING)]]
    scheduler = Scheduler(BlockAllocator(100, BLOCK), 100, 4, enable_prefix_caching=False)
    scheduler.waiting.extend(Request(list(BEGINNING), SamplingParams()) for _ in range(3))
    assert [piece.num_tokens for piece in scheduler.schedule(0.0).pieces] == 3 * [len(BEGINNING)]


def test_the_border_that_was_noted_first_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse_module, "_MOST_FORKS", 2)
    forks = Forks(BLOCK, 1 << 20)
    for key in (b"a", b"b", b"a", b"c"):
        forks.mark(key)
    assert [key in forks for key in (b"a", b"b", b"c")] == [True, False, True]


@pytest.mark.parametrize(
    ("prompt", "waits"), [([*BEGINNING, 1], True), ([*BEGINNING, 2], True), (BEGINNING[:9], True), ([5] * 9, False)]
)
def test_states_are_found_where_a_prompt_ends(prompt: list[int], waits: bool) -> None:
    scheduler = Scheduler(BlockAllocator(100, BLOCK, 8), 100, 4)
    scheduler.waiting.extend(Request(list(tokens), SamplingParams()) for tokens in ([*BEGINNING, 1], prompt))
    assert len(scheduler.schedule(0.0).pieces) == (1 if waits else 2)


@given(
    ends=st.lists(st.lists(st.integers(0, 3), max_size=6), min_size=1, max_size=12),
    shared=st.lists(st.integers(0, 5), min_size=1, max_size=12),
    budget=st.sampled_from([3, 8, 64]),
    per_step=st.integers(1, 6),
)
def test_no_block_is_computed_twice(ends: list[list[int]], shared: list[int], budget: int, per_step: int) -> None:
    """With room for all, no two requests compute a block that both can find."""
    model = HashModel()
    engine = make_engine(400, budget, model=model)
    prompts = [BEGINNING[: BLOCK * (number % 6)] + end + [1] for number, end in zip(shared * 12, ends, strict=False)]
    requests: list[Request] = []
    for start in range(0, len(prompts), per_step):
        requests += add_all(engine, prompts[start : start + per_step])
        engine.step()
    list(engine.run())
    check_tokens(requests)
    blocks = {tuple(p[:end]) for p in prompts for end in range(BLOCK, len(p), BLOCK)}
    rest = sum((len(prompt) - 1) % BLOCK + 1 for prompt in prompts)
    num_computed = sum(len(request.prompt_token_ids) - request.num_cached_tokens for request in requests)
    assert num_computed <= len(blocks) * BLOCK + rest


KEYS = [bytes([index]) * 32 for index in range(3)]


class Asked:
    """Costs that note what they are asked."""

    def __init__(self, answer: bool) -> None:
        self.asked: list[tuple[int, int]] = []
        self._answer = answer

    def should_load(self, num_tokens: int, context: int) -> bool:
        self.asked.append((num_tokens, context))
        return self._answer


def computed(allocator: BlockAllocator, num_blocks: int, reuse: PrefixReuse) -> Request:
    """Return a request of so many blocks, whose prompt has been computed and is remembered where that is enabled."""
    request = Request(list(range(num_blocks * BLOCK)), SamplingParams(max_new_tokens=1))
    request.block_ids.extend(allocator.allocate(num_blocks))
    request.num_computed_tokens = num_blocks * BLOCK
    reuse.remember(request)
    return request


def make_reuse(costs: LoadCosts) -> tuple[BlockAllocator, HostTier, PrefixReuse]:
    allocator, tier = BlockAllocator(9, BLOCK), HostTier(9)
    return allocator, tier, PrefixReuse(allocator, True, tier, costs)


def test_without_prefix_caching_nothing_is_remembered() -> None:
    allocator, tier = BlockAllocator(9, BLOCK), HostTier(9)
    request = computed(allocator, 2, PrefixReuse(allocator, False, tier, Asked(True)))
    assert allocator.find(request.block_keys(0, 2, BLOCK)) == []
    assert tier.num_pending == 0


@pytest.mark.parametrize("pays", [False, True])
def test_blocks_are_loaded_where_that_pays(pays: bool) -> None:
    """The choice knows the tokens to load and those before them."""
    costs = Asked(pays)
    allocator, tier, reuse = make_reuse(costs)
    first = computed(allocator, 1, reuse)
    request = Request(list(range(4 * BLOCK)), SamplingParams(max_new_tokens=1))
    keys = request.block_keys(0, 3, BLOCK)
    for key in keys[1:]:
        tier.blocks.add(key)
    found = reuse.find(request)
    assert costs.asked == [(2 * BLOCK, BLOCK)]
    assert found == Found(list(first.block_ids), keys=keys[1:] if pays else [])


def test_loads_go_into_the_blocks_after_those_of_the_cache() -> None:
    _, tier, reuse = make_reuse(Asked(True))
    for key in KEYS[:2]:
        tier.blocks.add(key)
    loading = reuse.load(Found([5], keys=KEYS[:2]), [5, 6, 7, 8], None)
    assert (loading.keys, list(loading.blocks), loading.state) == (KEYS[:2], [6, 7], None)
