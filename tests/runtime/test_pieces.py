"""Sizes of prompts' pieces: what fits, what is useful, what a step's first piece exceeds."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpmla.runtime.costs import TOKEN_COSTS
from dcpmla.runtime.graph_sizes import mixed_sizes
from dcpmla.runtime.pieces import PieceSizes, Room
from tests.support.costs import DrawnCosts

LIMIT = 2048  # of a step's tokens


class CallCosts(DrawnCosts):
    """Costs of each piece, of each token, and of each token of the context."""

    def __init__(self, max_loss: float, is_strict: bool, call_us: float = 100.0) -> None:
        super().__init__(0)
        self.max_prefill_us, self.max_loss, self.is_strict, self._us = 1000.0, max_loss, is_strict, call_us

    def piece_us(self, new: int, context: int) -> float:
        return self._us + new + context / 10


def price_share(costs: CallCosts, new: int, context: int) -> float:
    """Return the share of a piece's time by which two pieces take longer than one."""
    return (costs._us + (context + new) / 10) / costs.piece_us(new, context)


rooms = st.builds(
    lambda num_before, us, is_first: Room(num_before, LIMIT - num_before, us, is_first),
    st.integers(0, LIMIT - 1),
    st.floats(0, 3000),
    st.booleans(),
)
costs_of_calls = st.builds(CallCosts, st.sampled_from([1 / 16, 0.25, 0.5]), st.booleans(), st.sampled_from([0, 100]))


@given(costs=costs_of_calls, context=st.integers(0, 5000), num_left=st.integers(1, 5000), room=rooms)
def test_a_piece_fits_and_is_useful(costs: CallCosts, context: int, num_left: int, room: Room) -> None:
    new, limit = PieceSizes(costs, LIMIT).choose(context, num_left, room), min(num_left, room.limit)
    assert room.is_first <= new <= limit
    fits = costs.piece_us(new, context) <= room.us
    if num_left <= room.limit and costs.piece_us(num_left, context) <= room.us:
        assert new == num_left
    if not room.is_first and new:
        assert fits
        assert new == num_left or price_share(costs, new, context) <= costs.max_loss
    if room.is_first and costs.is_strict:
        assert fits or new == min(64, limit)
    if room.is_first and not costs.is_strict and new < limit:
        assert price_share(costs, new, context) <= costs.max_loss
    if 0 < new < limit and not (room.is_first and costs.is_strict):
        assert room.num_before + new in mixed_sizes(LIMIT)


@given(costs=costs_of_calls, context=st.integers(0, 5000), num_left=st.integers(1, 5000), room=rooms)
def test_pieces_are_as_large_as_the_room(costs: CallCosts, context: int, num_left: int, room: Room) -> None:
    """Among the sizes that fill a step, or end the prompt: the largest that fits, or a first piece's least useful."""
    new, limit = PieceSizes(costs, LIMIT).choose(context, num_left, room), min(num_left, room.limit)
    ends = [size - room.num_before for size in mixed_sizes(LIMIT) if 0 < size - room.num_before < limit] + [limit]
    useful = [end for end in ends if end == num_left or price_share(costs, end, context) <= costs.max_loss]
    fitting = [end for end in ends if costs.piece_us(end, context) <= room.us]
    if not room.is_first:
        assert new == max({*fitting} & {*useful}, default=0)
    elif not costs.is_strict:
        assert new == max([*fitting, min([*useful, limit])])
    elif fitting and fitting[-1] >= 64:
        assert new == fitting[-1]


@pytest.mark.parametrize(("is_strict", "pieces"), [(True, [768, 768, 384, 64]), (False, [768, 1024, 2048, 2048])])
def test_a_first_piece_exceeds_a_limit_that_is_not_strict(is_strict: bool, pieces: list[int]) -> None:
    """To read 1,000 tokens again takes a quarter of the time of 1,000 more; with 9,000 alone nothing fits."""
    sizes = PieceSizes(CallCosts(0.25, is_strict), LIMIT)
    contexts = (0, 1000, 5000, 9000)
    assert [sizes.choose(context, 10_000, Room(0, LIMIT, 1000.0, True)) for context in contexts] == pieces


def test_a_strict_piece_has_more_than_the_end_of_a_small_step() -> None:
    """After 100 tokens, 28 fill a step of 128, and 156 one of 256."""
    room = Room(100, LIMIT - 100, 250.0, True)
    assert PieceSizes(CallCosts(0.25, True), LIMIT).choose(0, 10_000, room) == 150


@pytest.mark.parametrize("num_before", [0, 3, 500])
def test_without_limits_of_time_a_piece_takes_the_room(num_before: int) -> None:
    room = Room(num_before, LIMIT - num_before, math.inf, True)
    for costs in (TOKEN_COSTS, CallCosts(1 / 16, False)):
        assert PieceSizes(costs, LIMIT).choose(0, 10_000, room) == LIMIT - num_before
