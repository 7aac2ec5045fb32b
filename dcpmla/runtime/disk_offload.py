"""Transfers between host memory and disks, which all ranks agree on (`DiskOffload`)."""

import math
import time
from collections.abc import Callable, Sequence

from dcpmla.cache.disk_files import DiskMove, Place
from dcpmla.cache.disk_transfer import DiskTransfers, Transfer
from dcpmla.cache.host import HostMemory
from dcpmla.cache.tier import HostTier, SlotTable
from dcpmla.runtime.disk_reads import DiskReads, Part, writing_limit
from dcpmla.runtime.progress import Progress
from dcpmla.runtime.stats import CopyTotals

_MAX_WRITTEN = 1024  # blocks of a transfer; the files' queues hold 4,096
# Reads at a time, besides a write of blocks and one of states. A message carries the progress of the oldest seven
# transfers, and loads from host memory must not wait for writes.
_MAX_READS = 3
_CLOSE_SECONDS = 10.0  # limit of the time for writes at the end
_POLL_SECONDS = 1e-3


class _Writer:
    """Blocks, or states, on their way to the disk, and others that wait for it.

    Args:
        host, disk: Content of host memory and of the disk.
    """

    def __init__(self, host: SlotTable, disk: SlotTable) -> None:
        self._host, self._disk = host, disk
        self._unwritten: dict[bytes, None] = {}  # the oldest first
        self._writing: set[bytes] = set()

    def add(self, key: bytes) -> None:
        """Note new content of host memory, which is to be written unless it has left host memory before."""
        if self._disk.num_slots and key not in self._disk and key not in self._writing:
            self._unwritten[key] = None
            if len(self._unwritten) > 2 * self._host.num_slots:
                self._unwritten = {key: None for key in self._unwritten if key in self._host}

    @property
    def is_writing(self) -> bool:
        """Return whether a transfer is under way."""
        return bool(self._writing)

    def take(self) -> list[Place]:
        """Return places of content to write next, whose host memory is kept until `end`."""
        places: list[Place] = []
        limit = min(_MAX_WRITTEN, writing_limit(self._host))
        while self._unwritten and len(places) < limit:
            key = next(iter(self._unwritten))
            if key in self._host and key not in self._disk:
                slot = self._disk.take()
                if slot is None:  # all of the disk's content is being read
                    break
                places.append(Place(key, slot, self._host.slots([key])[0]))
                self._host.hold([key])
                self._writing.add(key)
            del self._unwritten[key]
        return places

    def end(self, places: list[Place], is_written: bool) -> None:
        """Note on all ranks that places are written, or that a rank has failed to."""
        for key, disk_slot, _ in places:
            self._host.release([key])
            self._writing.remove(key)
            if is_written:
                self._disk.put(key, disk_slot)
            else:
                self._disk.free(disk_slot)


class DiskOffload:
    """The files of a rank below its host memory.

    Blocks and states are written after they have been copied to host memory, unless they have left it by then. No
    request waits for a write. Writes keep at most a quarter of host memory from other uses.

    Args:
        memory: Host memory of this rank, with files.
        tier: Content of host memory and of the disk.
        reads: Blocks that waiting requests want.
        progress: Transfers that all ranks agree on.
    Attributes:
        loaded, stored: Totals of transfers that have ended on all ranks.
    """

    def __init__(self, memory: HostMemory, tier: HostTier, reads: DiskReads, progress: Progress) -> None:
        assert memory.disk is not None
        self._files, self._memory, self._tier, self._reads, self._progress = memory.disk, memory, tier, reads, progress
        self._forget()

    def _forget(self) -> None:
        tier = self._tier
        self._blocks, self._states = _Writer(tier.blocks, tier.disk.blocks), _Writer(tier.states, tier.disk.states)
        self._moves: dict[DiskMove, Callable[[bool], None]] = {}  # under way, with the functions of their ends
        self._num_reads = 0
        self.loaded, self.stored = CopyTotals(), CopyTotals()

    def add_blocks(self, keys: Sequence[bytes]) -> None:
        """Note blocks that are being copied to host memory."""
        for key in keys:
            self._blocks.add(key)

    def add_state(self, key: bytes) -> None:
        """Note a state that is being copied to host memory."""
        self._states.add(key)

    def begin(self) -> None:
        """Begin transfers: reads that requests wait for, and writes."""
        while self._reads.queue and self._num_reads < _MAX_READS:
            self._read(self._reads.queue.popleft())
        for writer, is_state in ((self._blocks, False), (self._states, True)):
            if not writer.is_writing and (places := writer.take()):
                self._write(writer, places, is_state)

    def close(self) -> None:
        """Write what host memory has and the disk lacks, unless that takes very long. From here on ranks do not agree:
        the next job compares their files.
        """
        deadline = time.monotonic() + _CLOSE_SECONDS
        self._reads.queue.clear()
        self.begin()
        while self._moves and self._wait(deadline):
            for move, on_end in list(self._moves.items()):
                on_end(not move.has_failed)
            self.begin()
        if not self._moves:
            self._files.close()

    def reset(self) -> None:
        """Forget all content, of an engine without requests whose tiers have forgotten theirs."""
        self._reads.reset()
        self._wait(math.inf)  # threads use the memory until then
        self._forget()

    def _read(self, part: Part) -> None:
        transfers, memory_of, num_bytes = self._content(part.is_state)

        def end(has_arrived: bool) -> None:
            self._num_reads -= 1
            self._end(move, self.loaded if has_arrived else None, part.is_state)
            self._reads.end(part, has_arrived)

        def start(place: Place) -> Transfer:
            return transfers.read(place.disk_slot, place.key, memory_of(place.host_slot))

        self._num_reads += 1
        move = DiskMove(part.places, self._memory.last_store, start, num_bytes)
        self._begin(move, end)

    def _write(self, writer: _Writer, places: list[Place], is_state: bool) -> None:
        transfers, memory_of, num_bytes = self._content(is_state)

        def end(is_written: bool) -> None:
            self._end(move, self.stored if is_written else None, is_state)
            writer.end(places, is_written)

        def start(place: Place) -> Transfer:
            return transfers.write(place.disk_slot, place.key, memory_of(place.host_slot))

        move = DiskMove(places, self._memory.last_store, start, num_bytes)
        self._begin(move, end)

    def _begin(self, move: DiskMove, on_end: Callable[[bool], None]) -> None:
        self._moves[move] = on_end
        self._progress.watch(move, on_end)

    def _end(self, move: DiskMove, totals: CopyTotals | None, is_state: bool) -> None:
        del self._moves[move]
        if totals is not None:
            totals.add(move, 0 if is_state else len(move.places))

    def _content(self, is_state: bool) -> tuple[DiskTransfers, Callable[[int], list[memoryview]], int]:
        """Return the transfers of blocks or of states, the memory of a slot, and its bytes."""
        if not is_state:
            return self._files.blocks, self._memory.block, self._memory.block_bytes
        assert self._files.states is not None
        return self._files.states, self._memory.state, self._memory.state_bytes

    def _wait(self, deadline: float) -> bool:
        """Wait for all transfers under way on this rank; return whether all have ended by then."""
        while not all([move.is_done for move in self._moves]):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True
