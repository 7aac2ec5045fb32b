"""Engines with host memory behind a tiny cache: every request gets the tokens that it gets alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpmla.runtime import offload
from dcpmla.runtime.sampling import SamplingParams
from tests.support.costs import DrawnLoadCosts
from tests.support.engine_loads import Load, check_empty, loads, serve
from tests.support.hash_model import BLOCK, alone_ignoring_eos, answer, make_engine
from tests.support.late_memory import LateMemory

OTHERS = [[1, 2, 3, 4] * 15, [4, 3, 2, 1] * 15]  # They fill a cache of 16 blocks, one after the other.


@given(
    load=loads(most=12, longest=20, latest=20, aborts=True),
    num_host_blocks=st.sampled_from([1, 4, 10, 100]),
    num_stored_together=st.sampled_from([1, 3, 32]),
    costs=st.integers(0, 3),
    num_polls=st.sampled_from([0, 1, 4, 1000]),
    with_graph=st.booleans(),
)
def test_every_request_gets_what_it_gets_alone(
    load: Load, num_host_blocks: int, num_stored_together: int, costs: int, num_polls: int, with_graph: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "_STORED_TOGETHER", num_stored_together)
        patch.setattr(LateMemory, "num_polls", num_polls)
        options = {"num_host_blocks": num_host_blocks, "with_graph": with_graph, "mixed": with_graph}
        engine = make_engine(*load.limits, memory=LateMemory, **options)
        engine.scheduler.reuse._costs = DrawnLoadCosts(costs)
        serve(engine, load)
        check_empty(engine)


@pytest.mark.parametrize("num_tokens", [24, 25])  # one token more than blocks is a decode
def test_others_decode_while_a_prompt_loads(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running request gets its tokens in successive steps; the loaded one joins when its copy has ended."""
    monkeypatch.setattr(LateMemory, "num_polls", 6)
    engine = make_engine(16, num_host_blocks=40, memory=LateMemory)
    prompt, other = ([7, 3, 5] * 9)[:num_tokens], [2, 9]
    for each in (prompt, *OTHERS):
        answer(engine, each, num_new=1)
    running = engine.add(other, SamplingParams(max_new_tokens=30, ignore_eos=True))
    for _ in range(3):
        engine.step()
    loaded = engine.add(prompt, SamplingParams(max_new_tokens=2, ignore_eos=True))
    num_steps = 0
    while not loaded.token_ids:
        num_before = len(running.token_ids)
        engine.step()
        assert len(running.token_ids) == num_before + 1
        num_steps += 1
    assert num_steps > 4
    list(engine.run())
    assert loaded.num_cached_tokens == (num_tokens - 1) // BLOCK * BLOCK
    assert loaded.token_ids == alone_ignoring_eos(prompt, 2)
    assert running.token_ids == alone_ignoring_eos(other, 30)


@pytest.mark.parametrize("with_graph", [False, True])
def test_without_others_a_step_waits_for_the_load(with_graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which began beside a request that has ended since."""
    monkeypatch.setattr(LateMemory, "num_polls", 1000)
    engine = make_engine(16, num_host_blocks=40, memory=LateMemory, with_graph=with_graph, mixed=with_graph)
    prompt = [7, 3, 5] * 8
    for each in (prompt, *OTHERS):
        answer(engine, each, num_new=1)
    engine.add([2, 9], SamplingParams(max_new_tokens=6, ignore_eos=True))
    engine.step()
    loaded = engine.add(prompt, SamplingParams(max_new_tokens=2, ignore_eos=True))
    num_steps = 0
    while not loaded.token_ids:
        engine.step()
        num_steps += 1
    assert 5 < num_steps < 20
    assert loaded.num_cached_tokens > 0
    list(engine.run())
    assert loaded.token_ids == alone_ignoring_eos(prompt, 2)


def test_blocks_of_an_aborted_load_are_written_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LateMemory, "num_polls", 8)
    engine = make_engine(16, num_host_blocks=60, memory=LateMemory)
    prompts = [[7, 3, 5] * 8, [2, 9, 9] * 8]
    for prompt in (*prompts, *OTHERS):
        answer(engine, prompt, num_new=1)
    running = engine.add([2, 9], SamplingParams(max_new_tokens=40, ignore_eos=True))
    for _ in range(3):
        engine.step()
    aborted = engine.add(prompts[0], SamplingParams(max_new_tokens=2))
    for _ in range(2):
        engine.step()
    assert aborted.is_loading
    engine.abort(aborted)
    others = [engine.add([index, 4] * 11, SamplingParams(max_new_tokens=9, ignore_eos=True)) for index in range(2)]
    for _ in range(4):
        engine.step()
    engine.add(prompts[1], SamplingParams(max_new_tokens=1))
    list(engine.run())
    assert running.token_ids == alone_ignoring_eos([2, 9], 40)
    assert [each.token_ids for each in others] == [alone_ignoring_eos([index, 4] * 11, 9) for index in range(2)]


def test_a_preempted_request_comes_from_host_memory() -> None:
    """Its blocks are overwritten while it waits; only its last, unfinished block is computed again."""
    engine = make_engine(9, num_host_blocks=40, memory=LateMemory)
    prompts = [[5, 1, 4] * 4, [6, 2, 8] * 4]
    answer(engine, *prompts, num_new=14, ignore_eos=True)
    assert engine.stats.num_preemptions > 0
    assert engine.offload is not None
    engine.offload.count()
    assert engine.offload.loaded.blocks > 0
