"""Parts on their way from slots of prefill ranks into the cache (`Reader`)."""

from dataclasses import dataclass

from torch import Tensor

from dcpmla.transfer.arrival import Arrival, Offered
from dcpmla.transfer.messages import Taken, encode
from dcpmla.transfer.moves import Mark
from dcpmla.transfer.parts import RowMover
from dcpmla.transfer.staging import TAGS_BYTES, Staging, make_tag, tags_match
from dcpmla.transfer.transport import Read, Transport


@dataclass(eq=False)
class _Reading:
    """A slot of this rank: first a read fills it, then a scatter empties it."""

    offered: Offered
    slot: int
    read: Read
    mark: Mark | None = None
    tags: Tensor | None = None


class Reader:
    """Reads into the slots of one rank, and scatters from them. One thread uses it.

    Args:
        transport: Transport of this rank.
        staging: Its slots.
        mover: Rows of this rank's cache.
    """

    def __init__(self, transport: Transport, staging: Staging, mover: RowMover) -> None:
        self._transport, self._staging, self._mover = transport, staging, mover
        self._readings: list[_Reading] = []

    @property
    def is_busy(self) -> bool:
        """Return whether a slot is in use."""
        return bool(self._readings)

    def start(self, offered: Offered) -> bool:
        """Start to read a part; return whether a slot was free.

        Raises:
            ConnectionError: The rank is lost.
            ValueError: It has no such slot.
        """
        slot = self._staging.take(offered.arrival.engine)
        if slot is None:
            return False
        ready, num_bytes = offered.ready, offered.part.num_bytes + TAGS_BYTES
        taken = encode(Taken(ready.handoff, ready.slot, ready.number))
        try:
            read = self._transport.read(offered.name, ready.slot, slot, num_bytes, taken)
        except BaseException:
            self._staging.free(slot)
            raise
        self._readings.append(_Reading(offered, slot, read))
        return True

    def advance(self) -> list[tuple[Arrival, str]]:
        """Advance all parts. For each part that has ended, return its arrival and its fault, or ""."""
        ended = []
        for reading in list(self._readings):
            try:
                fault = self._advance(reading)
            except Exception as error:
                fault = f"{type(error).__name__}: {error}"
            if fault is not None:
                self._readings.remove(reading)
                self._staging.free(reading.slot)
                ended.append((reading.offered.arrival, fault))
        return ended

    def _advance(self, reading: _Reading) -> str | None:
        """Advance a part; return None until it has ended, then its fault, or ""."""
        arrival, name, part, ready = reading.offered
        if reading.mark is None:
            if not reading.read.is_done:
                return None
            if reading.read.has_failed:
                return f"a read from {name} failed"
            if not arrival.is_wanted:
                return ""
            reading.mark = arrival.moves.run(lambda: self._scatter(reading), generation=0, after=arrival.opening)
            if reading.mark is None:
                return ""
        if not reading.mark.is_done:
            return None
        assert reading.tags is not None
        if not tags_match(reading.tags, make_tag(ready.handoff, ready.number)):
            return f"slot {ready.slot} of {name} was used again before it was read"
        arrival.num_bytes += part.num_bytes
        return ""

    def _scatter(self, reading: _Reading) -> None:
        arrival, _, part, _ = reading.offered
        reading.tags = self._staging.read_tags(reading.slot, part.num_bytes)
        content = self._staging.content(reading.slot, part.num_bytes)
        self._mover.scatter(part, arrival.blocks, arrival.state, content)
