"""A request's cache on its way into a decode rank: the engine's side (`Arrival`), and prefill ranks (`Source`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dcpmla.transfer.messages import Ready
from dcpmla.transfer.moves import SideStream
from dcpmla.transfer.outcome import CANCELLED, Outcome
from dcpmla.transfer.route import Part, Route


class Arrival(Outcome):
    """A request's blocks and state on their way from a prefill server. The engine's thread calls it.

    It is done when all ranks that send to this one have sent everything, or when it has failed; until then the blocks
    and the state belong to it.

    Args:
        name: Name of the handoff.
        engine: Name of the prefill server.
        start, num_tokens: Range of positions that arrive.
        blocks: The request's blocks, from its first position on.
        state: Number of the state; None for caches without states.
        stream: Stream of scatters.
        wake: Function that wakes the thread that reads.
    Attributes:
        opening: Point in the engine's work before which the blocks may be in use.
        is_wanted: Whether the thread that reads goes on with it.
    """

    def __init__(
        self,
        name: str,
        engine: str,
        start: int,
        num_tokens: int,
        blocks: Sequence[int],
        state: int | None,
        stream: SideStream,
        wake: Callable[[], None],
    ) -> None:
        super().__init__(name, stream)
        self.engine, self.start, self.num_tokens = engine, start, num_tokens
        self.blocks, self.state, self._wake = tuple(blocks), state, wake
        self.opening, self.is_wanted = stream.mark(), True
        self.note_opening()

    def cancel(self) -> None:
        """End it: later work on the current stream may overwrite the blocks and the state."""
        self.moves.stop()
        self.end(CANCELLED)
        self._wake()


@dataclass(eq=False)
class Source:
    """One prefill rank's part of an arrival, in the thread that reads.

    Attributes:
        name: Name of the rank's transport.
        route: Rows from it; None if it sends none to this rank.
        position: Position up to which its parts are known.
        num_tokens: End of the positions that arrive.
        part_bytes: Most bytes of a part.
        heard: Time of its last message.
        is_complete: Whether it has sent everything.
    """

    name: str
    route: Route | None
    position: int
    num_tokens: int
    part_bytes: int
    heard: float
    is_complete: bool = False
    parts: Sequence[Part] = ()
    index: int = 0
    range: tuple[int, int] | None = None
    max_bytes: int = 0

    def accept(self, ready: Ready) -> Part:
        """Return the part that a message offers.

        Raises:
            ValueError: It is not the next part.
        """
        if (ready.start, ready.end) != self.range or ready.max_bytes != self.max_bytes:
            self._start(ready)
        if self.index >= len(self.parts) or ready.part != self.index:
            raise ValueError(f"{self.name} sends part {ready.part} of positions {self.range} out of order")
        self.index += 1
        return self.parts[ready.part]

    def finish(self) -> None:
        """Note that all parts were sent.

        Raises:
            ValueError: Some parts are missing.
        """
        end = self.num_tokens
        if self.range != (end, end):
            self._start(Ready("", end, end, 0, self.max_bytes or self.part_bytes, 0, 0))
        if self.index != len(self.parts):
            raise ValueError(f"{self.name} left out parts of positions {self.range}")
        self.is_complete = True

    def _start(self, ready: Ready) -> None:
        """Start a range. The range before it is complete, and positions between the two have no rows here."""
        start, end, limit = ready.start, ready.end, ready.max_bytes
        is_next = self.position <= start <= end <= self.num_tokens and (start < end or start == self.num_tokens)
        is_first = self.range is None or self.range[0] < self.range[1]  # the state comes last
        if not is_first or not is_next or self.index != len(self.parts) or not 0 < limit <= self.part_bytes:
            raise ValueError(f"{self.name} sends positions {start} to {end} after {self.range}")
        if self.position < start and self._list(self.position, start, limit):
            raise ValueError(f"{self.name} left out positions {self.position} to {start}")
        self.parts = self._list(start, end, limit)
        self.position, self.range, self.index, self.max_bytes = end, (start, end), 0, limit

    def _list(self, start: int, end: int, max_bytes: int) -> Sequence[Part]:
        """Return the parts of a range, the state's for an empty one."""
        if self.route is None:
            return []
        return self.route.parts(start, end, max_bytes) if start < end else self.route.state_parts(end, max_bytes)
