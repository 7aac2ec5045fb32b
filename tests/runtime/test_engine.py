"""The engine under random loads: every request gets the tokens that it gets alone, and no block is lost. Steps are
launched before the tokens of the step before them are on the host, and nobody sees that they are.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from dcpmla.parallel.collectives import PeerFault
from dcpmla.runtime.batch import Batch
from dcpmla.runtime.engine import Engine
from dcpmla.runtime.request import Request
from dcpmla.runtime.sampling import SamplingParams
from tests.support.engine_loads import Load, loads, serve
from tests.support.hash_model import BLOCK, EOS, Clock, HashModel, alone, alone_ignoring_eos, answer, drive, make_engine


@given(load=loads())
def test_every_request_gets_what_it_gets_alone(load: Load) -> None:
    engine, finished = make_engine(*load.limits), list[Request]()

    def step() -> None:
        finished.extend(engine.step().finished)
        check_limits(engine, load)

    requests = serve(engine, load, step)
    assert Counter(finished) == Counter(requests)
    assert engine.allocator.num_free == load.num_blocks
    assert not engine.has_requests
    check_totals(engine, finished)


def check_totals(engine: Engine, finished: Sequence[Request]) -> None:
    model: Any = engine.model
    stats = engine.stats
    assert (stats.num_finished, stats.num_steps) == (len(finished), len(model.steps))
    assert stats.num_new_tokens == sum(len(request.token_ids) for request in finished)
    assert stats.num_preemptions == sum(request.num_preemptions for request in finished)
    assert stats.num_cached_tokens == sum(request.num_cached_tokens for request in finished)
    assert stats.num_prefill_tokens + stats.num_decode_tokens == sum(map(sum, model.steps))


def check_limits(engine: Engine, load: Load) -> None:
    model: Any = engine.model
    assert all(sum(step) <= load.max_num_batched_tokens for step in model.steps[-1:])
    assert len(engine.scheduler.running) <= load.max_num_seqs
    held = {block for request in engine.scheduler.running for block in request.block_ids}
    assert engine.allocator.num_free == load.num_blocks - len(held)


def test_the_loads_reach_what_they_are_for() -> None:
    """Preemption, reuse and chunked prompts happen in such loads: otherwise the test above shows nothing."""
    engine = make_engine(num_blocks=7, max_num_batched_tokens=7)
    shared = list(range(9))
    prompts = [[*shared, 20 + index] for index in range(4)]
    answer(engine, *prompts, num_new=12, ignore_eos=True)
    assert engine.stats.num_preemptions > 0
    assert engine.stats.num_cached_tokens >= 8
    model: Any = engine.model
    assert any(len(step) > 1 and max(step) > 1 and min(step) == 1 for step in model.steps)  # decodes beside a chunk


def test_decodes_come_first_and_prompts_fill_up() -> None:
    engine = make_engine(num_blocks=50, max_num_batched_tokens=8)
    engine.add([1, 2, 3], SamplingParams(max_new_tokens=9, ignore_eos=True))
    engine.step()
    engine.add(list(range(20)), SamplingParams(max_new_tokens=2, ignore_eos=True))
    for _ in range(4):
        engine.step()
    model: Any = engine.model
    assert model.steps == [[3], [1], [1, 7], [1, 7], [1, 6], [1, 1]]  # the second one ran when the prompt came


def test_the_youngest_gives_way_and_comes_back_first() -> None:
    engine = make_engine(num_blocks=5)
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    old, young, later = (engine.add([index, 1, 2, 3], params) for index in range(3))
    finished = list(engine.run())
    assert finished == [old, young, later]
    assert [request.num_preemptions for request in finished] == [0, 1, 1]
    assert engine.stats.num_preemptions == 2
    assert engine.stats.max_num_running == 3
    assert [request.token_ids for request in finished] == [
        alone_ignoring_eos([index, 1, 2, 3], 12) for index in range(3)
    ]


def test_a_prefix_is_computed_once() -> None:
    engine = make_engine(num_blocks=50)
    prompt = list(range(2 * BLOCK + 1))
    for expected in (0, 2 * BLOCK, 2 * BLOCK):
        assert answer(engine, prompt, num_new=1)[0].num_cached_tokens == expected
    # The last token is always computed, so a prompt of full blocks reuses all but the last.
    assert answer(engine, prompt[:-1], num_new=1)[0].num_cached_tokens == BLOCK
    # New tokens are reused as well: the next turn of a conversation.
    (request,) = answer(engine, prompt, num_new=2 * BLOCK, ignore_eos=True)
    assert answer(engine, [*prompt, *request.token_ids, 7], num_new=1)[0].num_cached_tokens == 4 * BLOCK
    assert engine.stats.num_cached_tokens == (0 + 2 + 2 + 1 + 2 + 4) * BLOCK


def test_arrival_times_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    engine = make_engine(num_blocks=50)
    params = SamplingParams(max_new_tokens=1)
    # Whoever comes first does not wait for those that were added before it.
    last, gone, now, second, twin = (
        engine.add([index], params, arrival_time=at) for index, at in enumerate([90.5, None, None, 30, 30])
    )
    engine.abort(gone)
    steps: list[str] = []
    engine.on_step = steps.append
    assert list(engine.run()) == [now, second, twin, last]
    assert [request.arrival_time for request in (last, now, second)] == [90.5, 1, 30]
    for request in (last, second):
        assert request.scheduled_time is not None
        assert 0 <= request.scheduled_time - request.arrival_time <= 3  # it slept a second at most, and looked twice
        assert request.metrics()["queue_seconds"] == request.scheduled_time - request.arrival_time
    assert steps[0].startswith("prefill step 0 (1 requests, 1 tokens)")
    assert "waiting for the next request" in steps


def test_times_are_those_of_the_first_token_and_of_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    engine = make_engine(num_blocks=50)
    request = engine.add([5], SamplingParams(max_new_tokens=5, ignore_eos=True), arrival_time=0)
    list(engine.run())
    assert (request.scheduled_time, request.first_token_time, request.finish_time) == (2, 6, 17)
    assert request.metrics() == {"queue_seconds": 2, "time_to_first_token": 6, "time_per_token": 2.75}
    engine.restart_clock()
    assert engine.now == 0
    again = engine.add([5], SamplingParams(max_new_tokens=1))
    list(engine.run())
    assert (again.arrival_time, again.finish_time) == (1, 5)


def test_a_preempted_request_keeps_when_and_with_what_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    engine = make_engine(num_blocks=6)
    old = engine.add([0, 1, 2, 3, 4], SamplingParams(max_new_tokens=16, ignore_eos=True))
    young = engine.add([1, 1, 2, 3, 4], SamplingParams(max_new_tokens=16, ignore_eos=True))
    engine.step()
    computed_at_return = 0
    while engine.has_requests:
        engine.step()
        if young.num_preemptions and young.num_computed_tokens and not computed_at_return:
            computed_at_return = young.num_computed_tokens
    assert young.num_preemptions == 1
    assert (young.scheduled_time, young.first_token_time) == (old.scheduled_time, old.first_token_time) == (2, 6)
    assert computed_at_return > young.num_cached_tokens == 0


class FailingModel(HashModel):
    """Its third step fails, as a kernel of an exchange does: its results come, and are worth nothing."""

    num_looks = 0  # since it was launched: at the first, the results of the second step have come

    def check(self) -> None:
        self.num_looks += len(self.steps) >= 3
        if self.num_looks == 2:
            raise PeerFault("nothing came from rank 1")


@pytest.mark.parametrize("with_graph", [False, True])
def test_no_token_of_a_failed_step_is_given_out(with_graph: bool) -> None:
    engine, given = make_engine(num_blocks=50, model=FailingModel(), with_graph=with_graph), list[int]()
    params = SamplingParams(max_new_tokens=9, ignore_eos=True)
    request = engine.add([1, 2, 3], params)
    with pytest.raises(PeerFault):
        drive(engine, lambda request, _: given.append(request.token_ids[-1]))
    assert given == request.token_ids == alone_ignoring_eos([1, 2, 3], 2)


def test_new_tokens_end_where_the_model_does() -> None:
    engine = make_engine(num_blocks=50, max_model_len=10)
    requests = [engine.add(list(range(num)), SamplingParams(max_new_tokens=50, ignore_eos=True)) for num in (1, 4, 9)]
    list(engine.run())
    assert [len(request.token_ids) for request in requests] == [9, 6, 1]
    assert {request.finish_reason for request in requests} == {"length"}


@pytest.mark.parametrize(("num_blocks", "is_admitted"), [(5, False), (6, True)])
def test_a_block_is_left_for_each_that_runs(num_blocks: int, is_admitted: bool) -> None:
    """Two hold a block each and want another soon; the third asks for two."""
    engine = make_engine(num_blocks)
    for index in range(2):
        engine.add([index, 1], SamplingParams(max_new_tokens=5, ignore_eos=True))
    engine.step()
    third = engine.add(list(range(2 * BLOCK)), SamplingParams(max_new_tokens=1))
    engine.step()
    engine.step()
    assert bool(third.token_ids) == is_admitted
    list(engine.run())
    assert engine.stats.num_preemptions == 0


def test_who_was_refused_is_searched_for_again_when_blocks_come_free_or_are_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(num_blocks=5)
    searches: Counter[int] = Counter()
    find = engine.allocator.find

    def counted(keys: list[bytes]) -> list[int]:
        searches[len(keys)] += 1
        return find(keys)

    monkeypatch.setattr(engine.allocator, "find", counted)
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    requests = [engine.add([1, 1], params), engine.add(4 * [2, 1, 2, 3], replace(params, max_new_tokens=2))]
    assert list(engine.run()) == requests
    assert searches == {
        0: 1,
        3: 5,
    }  # when it came, at each of the three blocks that the other one filled, when that one was done


PARAMS = SamplingParams(max_new_tokens=4, ignore_eos=True)
STOPPED = next([index] for index in range(EOS) if 3 <= len(alone([index], 12)) < 12)  # a prompt that comes to its end


def test_a_step_goes_on_with_the_same_requests_in_the_same_order() -> None:
    requests, batch = [Request([1], PARAMS) for _ in range(3)], Batch(budget=10)
    for request in requests:
        batch.add(request, 1)
    batch.num_absorbed = 3
    assert batch.goes_on(requests)
    assert not batch.goes_on(requests[::-1])
    assert not batch.goes_on(requests[:2])


def test_nothing_is_computed_past_a_known_end() -> None:
    engine = make_engine(num_blocks=50)
    requests = [
        engine.add([index, 1, 2], SamplingParams(max_new_tokens=index + 1, ignore_eos=True)) for index in range(4)
    ]
    list(engine.run())
    model: Any = engine.model
    assert sum(map(sum, model.steps)) == sum(request.num_tokens - 1 for request in requests)


def test_the_token_past_a_stop_is_thrown_away() -> None:
    """The last step computes the token that stopped the request, and samples one that nobody gets."""
    engine, given = make_engine(num_blocks=50), list[int]()
    expected = alone(STOPPED, 12)
    request = engine.add(STOPPED, SamplingParams(max_new_tokens=50))
    assert drive(engine, lambda request, _: given.append(request.token_ids[-1])) == [request]
    assert given == request.token_ids == expected
    assert request.finish_reason == "stop"
    model: Any = engine.model
    assert sum(map(sum, model.steps)) == len(STOPPED) + len(expected)  # the stop token's row is one too many
    assert engine.stats.num_new_tokens == len(expected)
    assert (engine.allocator.num_free, engine.stats.num_steps) == (50, len(model.steps))


def test_an_engine_closes_with_a_step_under_way() -> None:
    engine = make_engine(num_blocks=50, with_graph=True)
    request = engine.add([1], PARAMS)
    engine.step()
    engine.close()
    assert request.num_in_flight == 0


@pytest.mark.parametrize("with_graph", [False, True])
def test_kept_logits_are_those_of_their_tokens(with_graph: bool) -> None:
    engine = make_engine(num_blocks=50, with_graph=with_graph)
    requests = [engine.add([index, *range(index)], PARAMS, keep_logits=True) for index in range(3)]
    list(engine.run())
    for request in requests:
        assert [int(row.argmax()) for row in request.logits] == request.token_ids
