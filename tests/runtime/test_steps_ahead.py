"""Steps are launched before the tokens of the step before them are on the host, and nobody sees that they are."""

from typing import Any

import pytest

from dcpmla.runtime.batch import Batch
from dcpmla.runtime.request import Request
from dcpmla.runtime.sampling import SamplingParams
from tests.support.hash_model import EOS, alone, drive, make_engine

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
