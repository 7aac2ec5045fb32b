"""What the warm-up serves, and that an engine after it over the same model has no trace of it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpmla.runtime.graph_sizes import warm_up_sizes
from dcpmla.runtime.made_steps import Made, made_steps
from dcpmla.runtime.warm_up import rehearse, warm_up
from tests.support.hash_model import HashDrafter, HashModel, answer, make_engine

SIZES = {2, 3, 4, 6, 8, 12, 16, 24, 32}


@given(largest=st.integers(1, 5000))
def test_a_size_is_near_each(largest: int) -> None:
    """Any size up to the largest has one that was taken, as large or larger by at most half."""
    found = warm_up_sizes(largest)
    assert found == sorted(set(found))
    assert found[-1] == largest
    for size in range(1, largest + 1):
        assert any(size <= each <= math.ceil(1.5 * size) for each in found)


@pytest.mark.parametrize("max_model_len", [48, 64, 200])
@pytest.mark.parametrize("with_graph", [False, True])
def test_steps_of_all_kinds_are_served(max_model_len: int, with_graph: bool) -> None:
    model, drafter = HashModel(), HashDrafter(3, 0.5, always=True)
    engine = make_engine(80, 64, 4, max_model_len, model=model, with_graph=with_graph, drafter=drafter)
    model.reads_anything = True
    warm_up(engine, made_steps(engine))
    model.reads_anything = False
    largest = min(64, max_model_len - 8)
    sizes = [step[0] for step in model.steps if len(step) == 1]
    assert set(sizes) >= SIZES | {largest}
    assert any(len(step) > 1 and min(step) > 1 for step in model.steps), "prompts of several requests"
    assert any(1 in step and max(step) > 1 for step in model.steps), "prompts and decodes"
    assert any(len(step) > 1 and set(step) == {max(step)} for step in model.steps), "turns of several requests"
    assert engine.stats.num_draft_tokens > 0
    assert engine.stats.num_prefill_tokens > sum(SIZES | {1, largest}) + 64, "more at once than a step takes"
    assert not engine.has_requests
    assert engine.allocator.num_free == 80
    after = make_engine(80, 64, 4, max_model_len, model=model, drafter=drafter)
    answer(after, [5, 6, 7], num_new=12)


def test_requests_forbid_a_reset() -> None:
    engine = make_engine(80)
    engine.add([1])
    with pytest.raises(ValueError, match="without requests"):
        engine.reset()


@pytest.mark.parametrize(("num_blocks", "max_num_batched_tokens", "max_num_seqs", "max_model_len"), [
    (1, 64, 4, 200), (3, 64, 1, 200), (50, 1, 1, 30), (50, 64, 4, 2), (50, 64, 4, 9), (50, 7, 3, 100),
])  # fmt: skip
def test_small_engines_serve_what_fits(
    num_blocks: int, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int
) -> None:
    model = HashModel()
    model.reads_anything = True
    engine = make_engine(num_blocks, max_num_batched_tokens, max_num_seqs, max_model_len, model=model)
    warm_up(engine, made_steps(engine))
    assert not engine.has_requests
    assert engine.allocator.num_free == num_blocks


@pytest.mark.parametrize("with_graph", [False, True])
def test_a_rehearsal_finds_the_first_step_with_each_kernel(with_graph: bool) -> None:
    """Steps of as many tokens have the same kernel here, and graphs pad steps to their sizes."""
    model = HashModel()
    engine = make_engine(80, 64, 4, 100, model=model, with_graph=with_graph)
    model.reads_anything = True

    class Kernels:
        def __len__(self) -> int:
            return len({sum(step) for step in model.steps})

    graphs = [graph for graph in (engine.mixed_graph, engine.graph) if graph is not None]
    found = rehearse(engine, graphs, Kernels())
    new = [sum(made.num_new for made in step) for step in found]
    assert len(new) == len(set(new)), "no two steps with the same kernel"
    sizes = {sum(made.num_new for made in step) for step in made_steps(engine)}
    assert set(new) == sizes if not with_graph else set(new) < sizes
    assert [Made(0, 1)] in found or with_graph
