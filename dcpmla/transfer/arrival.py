"""A request's cache on its way into a decode rank: for the engine (`Arrival`), and for the thread that reads
(`Awaited`, with its `Source`).
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from dcpmla.transfer.messages import Ready
from dcpmla.transfer.moves import Mark, SideStream
from dcpmla.transfer.outcome import Outcome, Transfer
from dcpmla.transfer.route import Part, PartList
from dcpmla.transfer.transport import Read


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
        stream, wake: See `Outcome`.
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
        super().__init__(name, engine, stream, wake)
        self.start, self.num_tokens = start, num_tokens
        self.blocks, self.state = tuple(blocks), state
        self.opening, self.is_wanted = stream.mark(), True
        self.note_opening()


class Awaited(Transfer[Arrival]):
    """An arrival in the thread that reads.

    Attributes:
        sources: Prefill ranks that it comes from.
        offered: Parts that wait in their slots.
        num_moving: Number of its parts in slots of this rank.
    """

    def __init__(self, arrival: Arrival, sources: "dict[int, Source]") -> None:
        super().__init__(arrival, (arrival.engine, arrival.name))
        self.sources = sources
        self.offered: deque[Offered] = deque()
        self.num_moving = 0

    @property
    def is_complete(self) -> bool:
        is_moving = self.offered or self.num_moving
        return not is_moving and all(source.is_complete for source in self.sources.values())


@dataclass(eq=False)
class Offered:
    """A part in a slot of a prefill rank: first a read moves it to a slot of this rank, then a scatter into the cache.

    Attributes:
        name: Name of the rank's transport.
        ready: Message that offered it.
        slot, read: Slot of this rank, and the read into it; -1 and None before it has started.
        mark, tags: End of the scatter, and the slot's tags before it (`Staging.read_tags`); None before it has started.
    """

    awaited: Awaited
    name: str
    part: Part
    ready: Ready
    slot: int = -1
    read: Read | None = None
    mark: Mark | None = None
    tags: Tensor | None = None


@dataclass(eq=False)
class Source(PartList):
    """One prefill rank's part of an arrival, in the thread that reads.

    Attributes:
        part_bytes: Most bytes of a part that a slot of this rank holds.
        heard: Time of the rank's last message.
    """

    part_bytes: int = 0
    heard: float = 0.0

    def accept(self, ready: Ready) -> Part:
        """Return the part that a message offers.

        Raises:
            ValueError: It is not the next part.
        """
        if (ready.start, ready.end) != self.range or ready.max_bytes != self.max_bytes:
            self._start(ready.start, ready.end, ready.max_bytes)
        if self.is_at_end or ready.part != self.index:
            raise ValueError(f"{self.name} sends part {ready.part} of positions {self.range} out of order")
        self.index += 1
        return self.parts[ready.part]

    def finish(self) -> None:
        """Note that all parts were sent.

        Raises:
            ValueError: Some parts are missing.
        """
        if not self.has_state:
            self._start(self.num_tokens, self.num_tokens, self.max_bytes)
        if not self.is_at_end:
            raise ValueError(f"{self.name} left out parts of positions {self.range}")
        self.is_complete = True

    def _start(self, start: int, end: int, max_bytes: int) -> None:
        """Start a range. The range before it is complete, and positions between the two have no rows here."""
        is_next = self.position <= start <= end <= self.num_tokens and (start < end or start == self.num_tokens)
        if self.has_state or not is_next or not self.is_at_end or not 0 < max_bytes <= self.part_bytes:
            raise ValueError(f"{self.name} sends positions {start} to {end} after {self.range}")
        self.max_bytes = max_bytes
        if self.position < start and self._list(self.position, start):
            raise ValueError(f"{self.name} left out positions {self.position} to {start}")
        self.start_range(start, end)
