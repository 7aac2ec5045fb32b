"""A handoff in the thread that sends (`Served`), and what fills slots with its parts (`Filler`)."""

import time
from collections.abc import Iterable
from itertools import count

from dcpmla.transfer.handoff import Computed, Handoff, Offer, Target
from dcpmla.transfer.messages import Ready
from dcpmla.transfer.outcome import Transfer
from dcpmla.transfer.parts import RowMover
from dcpmla.transfer.route import Part
from dcpmla.transfer.staging import MOST_SLOTS, Staging, make_tag


class Served(Transfer[Handoff]):
    """A handoff that has begun, and the ranks of the one decode server that reads it.

    Args:
        ranks: Ranks of the decode server that this rank talks with; none while it is not known.
    Attributes:
        targets: Parts of the ranks that have asked.
        heard: Times of the latest messages of ranks.
    """

    def __init__(self, handoff: Handoff, ranks: Iterable[int]) -> None:
        super().__init__(handoff, handoff.name)
        self.ranks = set(ranks)
        self.targets: dict[int, Target] = {}
        self.heard: dict[int, float] = {}
        self._final_at: float | None = None

    @property
    def is_complete(self) -> bool:
        complete = {rank for rank, target in self.targets.items() if target.is_complete}
        return bool(complete) and complete.issuperset(self.ranks)

    def silent_rank(self, since: float) -> str | None:
        """Return the name of a rank that has sent nothing since a time, and must have; None without one."""
        silent = [rank for rank, target in self.targets.items() if not target.is_complete and self.heard[rank] < since]
        computed = self.outcome.snapshot()[1]
        if not silent and computed is not None and computed.is_final:
            if self._final_at is None:
                self._final_at = time.monotonic()
            if not self.outcome.engine:
                return "a decode server" if max([self._final_at, *self.heard.values()]) < since else None
            late = self.ranks.difference(self.targets)
            silent = [rank for rank in late if max(self._final_at, self.heard.get(rank, 0.0)) < since]
        return f"rank {silent[0]} of decode server {self.outcome.engine}" if silent else None


class Filler:
    """Gathers of parts into slots.

    Args:
        staging: Slots of this rank.
        mover: Rows of this rank's cache.
    """

    def __init__(self, staging: Staging, mover: RowMover) -> None:
        self._staging, self._mover, self._counts = staging, mover, count()

    def fill(self, handoff: Handoff, target: Target) -> bool:
        """Start to fill a slot with the next part for a rank; return whether there was a part that could be sent now.

        Raises:
            ValueError: The rank asked for another number of tokens; a row is larger than a slot.
        """
        generation, computed = handoff.snapshot()
        if computed is None or len(target.offers) == MOST_SLOTS:
            return False
        if computed.is_final and computed.num_tokens != target.num_tokens:
            raise ValueError(f"the prompt has {computed.num_tokens} tokens, and {target.num_tokens} were asked for")
        part = target.next_part(computed)
        if part is None:
            return False
        mark_of_rows = computed.points[-1].mark
        if not part.is_state:
            mark_of_rows = computed.point(target.position).after(part.last_layer)
        # A gather that waited would hold up later ones, of other handoffs.
        slot = self._staging.take(handoff.engine) if mark_of_rows.is_done else None
        if slot is None:
            return False
        assert target.range is not None
        number, mark = next(self._counts), None
        try:
            mark = handoff.moves.run(
                lambda: self._gather(part, computed, slot, make_tag(handoff.name, number)), generation, mark_of_rows
            )
        finally:
            if mark is None:
                self._staging.free(slot)
        if mark is None:
            return False
        ready = Ready(handoff.name, *target.range, target.index, target.max_bytes, slot, number)
        target.offers[slot] = Offer(ready, part.num_bytes, mark)
        target.index += 1
        return True

    def _gather(self, part: Part, computed: Computed, slot: int, tag: bytes) -> None:
        content = self._staging.content(slot, part.num_bytes)
        self._mover.gather(part, computed.blocks, computed.state, content)
        self._staging.write_tags(slot, part.num_bytes, tag)
