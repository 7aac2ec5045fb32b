"""A request's cache on its way out of a prefill rank: the engine's side (`Handoff`), and decode ranks (`Target`)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from dcpmla.transfer.messages import Ready
from dcpmla.transfer.moves import Mark
from dcpmla.transfer.outcome import Outcome
from dcpmla.transfer.route import Part, PartList

# Positions of a range. A list of parts is made for each range, and a preempted request's range starts when all of it
# is computed again.
_RANGE = 1 << 14


class Point(NamedTuple):
    """A point in the engine's work up to which positions are computed.

    Attributes:
        num_tokens: Number of the positions.
        mark: End of their computation in all layers.
        starts: For each layer, the beginning of its attention, by which the layers before it have their rows; None
            where it is not known.
    """

    num_tokens: int
    mark: Mark
    starts: Sequence[Mark | None] = ()

    def after(self, layer: int) -> Mark:
        """Return a mark by which a layer and all before it have their rows."""
        start = self.starts[layer + 1] if layer + 1 < len(self.starts) else None
        return start or self.mark


class Computed(NamedTuple):
    """Content that can be sent.

    Attributes:
        blocks: Blocks that hold positions [0, num_tokens).
        points: Points in the engine's work, in its order. Points before the last one that was reached are left out.
        state: State after `num_tokens`; None without states, or if more is to come.
        is_final: Whether no more is to come.
    """

    blocks: tuple[int, ...]
    points: Sequence[Point]
    state: int | None
    is_final: bool

    @property
    def num_tokens(self) -> int:
        """Return the number of positions that are computed by the last point."""
        return self.points[-1].num_tokens

    def point(self, num_tokens: int) -> Point:
        """Return the first point with so many positions, or else the last one."""
        return next((point for point in self.points if point.num_tokens >= num_tokens), self.points[-1])


class Handoff(Outcome):
    """A request's blocks and state, for another job. The engine's thread calls it, and never waits for other ranks.

    It is done when all ranks of the decode server that read from this rank have read everything, or when it has failed:
    no rank asked in time, one was lost, the other job gave it up.
    Its engine is the decode server that reads it; "" until one has asked.
    """

    _computed: Computed | None = None

    def computed(self, blocks: Sequence[int], num_tokens: int, starts: Sequence[torch.cuda.Event | None] = ()) -> None:
        """Send positions [0, num_tokens), which work that is queued on the current stream computes.

        Args:
            blocks: The request's blocks.
            starts: For each layer, an event where its attention began in the last step; None where there is none.
        """
        known = [] if self._computed is None else [*self._computed.points]
        while len(known) > 1 and known[1].mark.is_done:
            del known[0]
        marks = [None if start is None else Mark(start) for start in starts]
        point = Point(num_tokens, self._stream.mark(), marks)
        self._set(Computed(tuple(blocks), (*known, point), None, False))

    def retract(self) -> None:
        """Stop sending: later work on the current stream may overwrite the blocks.

        A later `computed` sends the rest.
        """
        self._computed = None
        self.moves.stop()

    def finish(self, num_tokens: int, state: int | None) -> None:
        """Send the rest and the state. The blocks of the last `computed` and the state stay until it is done.

        Args:
            num_tokens: Number of tokens, all computed by work that is queued on the current stream.
            state: Number of the state after them; None for caches without states.
        """
        blocks, points = ((), ()) if self._computed is None else self._computed[:2]
        self._set(Computed(blocks, (*points, Point(num_tokens, self._stream.mark())), state, True))

    def cancel(self) -> None:
        """End it: later work on the current stream may overwrite the blocks and the state."""
        self._computed = None
        super().cancel()

    def snapshot(self) -> tuple[int, Computed | None]:
        """Return what can be sent, and the generation of moves in which it can. For the thread that sends."""
        generation = self.moves.generation  # read first: what follows a stop must not run as if before it
        return generation, self._computed

    def _set(self, computed: Computed) -> None:
        self._computed = computed
        self._wake()


@dataclass(eq=False)
class Offer:
    """A slot with a part: first its gather runs, then the decode rank reads it.

    Attributes:
        ready: Message to the decode rank.
        num_bytes: Bytes of content.
        mark: End of the gather.
        is_sent: Whether the message was sent.
    """

    ready: Ready
    num_bytes: int
    mark: Mark
    is_sent: bool = False


@dataclass(eq=False)
class Target(PartList):
    """One decode rank's part of a handoff, in the thread that sends.

    Attributes:
        offers: Slots that hold its parts.
    """

    offers: dict[int, Offer] = field(default_factory=dict)

    def next_part(self, computed: Computed) -> Part | None:
        """Return the next part that can be sent, or None; the index goes on when it is sent."""
        while self.is_at_end and self._next_range(computed):
            pass
        return None if self.is_at_end or self.position > computed.num_tokens else self.parts[self.index]

    @property
    def has_sent_all(self) -> bool:
        """Return whether all parts are in slots, or were read."""
        return self.has_state and self.is_at_end

    def _next_range(self, computed: Computed) -> bool:
        """Start the next list of parts; return whether there is one."""
        start = self.position
        end = min(computed.point(start + 1).num_tokens, self.num_tokens, start + _RANGE)
        if start < end or (computed.is_final and not self.has_state):
            self.start_range(start, max(start, end))
            return True
        return False
