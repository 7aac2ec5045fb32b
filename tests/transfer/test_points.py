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
        taken = [(piece.tensor, piece.listed[piece.window].tolist()) for part in self.parts for piece in part.pieces]
        self.parts.clear()
        return taken


class Sender:
    """A handoff of 16 rows to another rank, over slots for 8 rows of a layer each."""

    def __init__(self) -> None:
        self.stream, self.mover = FakeStream(), Recorder()
        self.handoff = Handoff("a", "", self.stream, lambda: None)
        self.staging = Staging(allocate_staging(torch.device("cpu"), 8, 8 * ROW + 32))
        self.filler = Filler(self.staging, self.mover)
        self.target = Target("b", Route(LAYOUT, 0, LAYOUT, 0), 0, 16, 8 * ROW)

    def fill(self) -> list[tuple[int, list[int]]]:
        """Return the layers and rows that leave; they are read at once."""
        while self.filler.fill(self.handoff, self.target):
            self.staging.free(self.target.offers.popitem()[0])
        return self.mover.take()


@pytest.fixture
def sender(monkeypatch: pytest.MonkeyPatch) -> Sender:
    """Replace events at which layers begin by their own marks."""
    monkeypatch.setattr("dcpmla.transfer.handoff.Mark", lambda event: event)
    return Sender()


FIRST, SECOND = list(range(8)), list(range(8, 16))


def test_layers_of_a_step_leave_one_after_the_other(sender: Sender) -> None:
    starts, marks = [FakeMark() for _ in range(NUM_LAYERS)], sender.stream.marks
    sender.handoff.computed([0], 8)
    assert sender.fill() == []
    sender.handoff.computed([0, 1], 16, starts)  # the next step is launched while the first one runs
    assert sender.fill() == []
    marks[0].is_done = True
    assert sender.fill() == [(layer, FIRST) for layer in range(NUM_LAYERS)]
    starts[0].is_done = True
    assert sender.fill() == []
    starts[1].is_done = True
    assert sender.fill() == [(0, SECOND)]
    starts[2].is_done = starts[3].is_done = True
    assert sender.fill() == [(1, SECOND), (2, SECOND)]
    marks[1].is_done = True
    assert sender.fill() == [(3, SECOND)]
    sender.handoff.finish(16, None)
    assert not sender.target.has_sent_all
    sender.fill()
    assert sender.target.has_sent_all


def test_a_retracted_step_leaves_after_it_was_computed_again(sender: Sender) -> None:
    handoff, marks = sender.handoff, sender.stream.marks
    handoff.computed([0], 8, [FakeMark(True), FakeMark(True), None, None])
    assert sender.fill() == [(0, FIRST)]
    handoff.retract()
    marks[0].is_done = True
    assert sender.fill() == []
    handoff.computed([1], 4)
    marks[1].is_done = True
    assert sender.fill() == [], "some tokens of the step are missing"
    handoff.computed([1], 12)
    assert sender.fill() == []
    marks[2].is_done = True
    assert sender.filler.fill(handoff, sender.target)
    assert sender.mover.take() == [(1, FIRST)]
