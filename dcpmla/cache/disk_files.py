"""A rank's files on a disk, below its host memory (`DiskFiles`), and transfers of many blocks (`DiskMove`)."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dcpmla.cache.copies import Copy
from dcpmla.cache.disk_transfer import DiskTransfers, Transfer


class Place(NamedTuple):
    """The slots of a block, or of a state, on the disk and in host memory."""

    key: bytes
    disk_slot: int
    host_slot: int


class DiskFiles(NamedTuple):
    """The files of a rank.

    Attributes:
        blocks, states: Transfers of blocks and of states; states is None in caches without states.
    """

    blocks: DiskTransfers
    states: DiskTransfers | None = None

    def close(self) -> None:
        """Finish all writes, and close the files."""
        for transfers in self:
            if transfers is not None:
                transfers.close()


class DiskMove:
    """Blocks or states on their way between a disk and host memory, on this rank.

    It begins when copies into host memory have ended, which `is_done` looks after.

    Args:
        places: Slots of the blocks or states.
        after: Last copy that may write to the slots of host memory.
        start: Function that starts the transfer of a block or state.
        slot_bytes: Bytes of each.
    """

    def __init__(
        self, places: Sequence[Place], after: Copy, start: Callable[[Place], Transfer], slot_bytes: int
    ) -> None:
        self.places, self._after, self._start = places, after, start
        self.num_bytes = len(places) * slot_bytes
        self._begin_time = self._end_time = 0.0
        self._transfers: list[Transfer] | None = None
        self._num_ended = 0
        self.has_failed = False

    @property
    def is_done(self) -> bool:
        """Return whether all have ended, successfully or not."""
        if self._transfers is None:
            if not self._after.is_done:
                return False
            self._begin_time = time.perf_counter()
            self._transfers = [self._start(place) for place in self.places]
        while self._num_ended < len(self._transfers) and self._transfers[self._num_ended].is_done:
            transfer = self._transfers[self._num_ended]
            self.has_failed |= transfer.has_failed
            self._end_time = max(self._end_time, transfer.end_time)
            self._num_ended += 1
        return self._num_ended == len(self._transfers)

    @property
    def seconds(self) -> float:
        """Return the time that it took, once it has ended."""
        return self._end_time - self._begin_time
