"""Parts of a handoff leave layer by layer, once the engine's work has come so far."""

from dataclasses import dataclass

import pytest
import torch

from dcpmla.transfer.handoff import Handoff, Target
from dcpmla.transfer.layout import CacheLayout, TokenSpec
from dcpmla.transfer.moves import Mark, SideStream
from dcpmla.transfer.route import Part, Route
from dcpmla.transfer.served import Filler
from dcpmla.transfer.staging import Staging, allocate_staging

ROW, NUM_LAYERS = 32, 4
LAYOUT = CacheLayout(1, 1, 1, tuple(TokenSpec("latents", i, ROW, 8, 1, False) for i in range(NUM_LAYERS)), ())


@dataclass
class FakeMark:
    """A point that the test reaches."""

    is_done: bool = False


class FakeStream(SideStream):
    """A stream of the CPU whose marks are kept."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.marks: list[FakeMark] = []

    def mark(self) -> Mark:
        self.marks.append(FakeMark())
        return self.marks[-1]  # type: ignore[return-value]


class Recorder:
    """A mover that notes the parts."""

    def __init__(self) -> None:
        self.parts: list[Part] = []

    def gather(self, part: Part, blocks: object, state: object, out: object) -> None:
        self.parts.append(part)

    def take(self) -> list[tuple[int, list[int]]]:
        taken = [(piece.tensor, piece.rows.tolist()) for part in self.parts for piece in part.pieces]
        self.parts.clear()
        return taken


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[FakeMark]:
    """Events at which layers begin, which are their own marks."""
    monkeypatch.setattr("dcpmla.transfer.handoff.Mark", lambda event: event)
    return [FakeMark() for _ in range(NUM_LAYERS)]


def test_layers_of_a_step_leave_one_after_the_other(starts: list[FakeMark]) -> None:
    stream, mover = FakeStream(), Recorder()
    handoff = Handoff("a", "", stream, lambda: None)
    staging = Staging(allocate_staging(torch.device("cpu"), 8, 8 * ROW + 32))  # for a layer of 8 rows each
    filler = Filler(staging, mover)
    target = Target("b", Route(LAYOUT, 0, LAYOUT, 0), 0, 16, 8 * ROW)

    def fill() -> list[tuple[int, list[int]]]:
        while filler.fill(handoff, target):
            staging.free(target.offers.popitem()[0])  # it is read at once
        return mover.take()

    first, second = list(range(8)), list(range(8, 16))
    handoff.computed([0], 8)
    assert fill() == []
    handoff.computed([0, 1], 16, starts)  # the next step is launched while the first one runs
    assert fill() == []
    stream.marks[0].is_done = True
    assert fill() == [(layer, first) for layer in range(NUM_LAYERS)]
    starts[0].is_done = True
    assert fill() == []
    starts[1].is_done = True
    assert fill() == [(0, second)]
    starts[2].is_done = starts[3].is_done = True
    assert fill() == [(1, second), (2, second)]
    stream.marks[1].is_done = True
    assert fill() == [(3, second)]
    handoff.finish(16, None)
    assert not target.has_sent_all
    fill()
    assert target.has_sent_all


def test_a_retracted_step_leaves_after_it_was_computed_again(starts: list[FakeMark]) -> None:
    stream, mover = FakeStream(), Recorder()
    handoff = Handoff("a", "", stream, lambda: None)
    filler = Filler(Staging(allocate_staging(torch.device("cpu"), 8, 8 * ROW + 32)), mover)
    target = Target("b", Route(LAYOUT, 0, LAYOUT, 0), 0, 16, 8 * ROW)
    handoff.computed([0], 8, [FakeMark(True), FakeMark(True), None, None])
    assert filler.fill(handoff, target)
    assert not filler.fill(handoff, target)
    handoff.retract()
    stream.marks[0].is_done = True
    assert not filler.fill(handoff, target)
    handoff.computed([1], 4)
    stream.marks[1].is_done = True
    assert not filler.fill(handoff, target), "some tokens of the step are missing"
    handoff.computed([1], 12)
    assert not filler.fill(handoff, target)
    stream.marks[2].is_done = True
    target.offers.clear()
    assert filler.fill(handoff, target)
    assert mover.take() == [(0, list(range(8))), (1, list(range(8)))]
