"""Blocks and states between host memory and disks: reads for waiting requests (`DiskReads`), and all transfers
(`DiskOffload`).

Every rank of a TP group makes the same calls, so all ranks know the same readings, and agree on transfers that end.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import NamedTuple

from dcpmla.cache.disk_files import DiskMove, Place
from dcpmla.cache.disk_transfer import Transfer
from dcpmla.cache.host import HostMemory
from dcpmla.cache.tier import HostTier, SlotTable
from dcpmla.runtime.progress import Progress
from dcpmla.runtime.request import Request
from dcpmla.runtime.reuse import Found, PrefixReuse
from dcpmla.runtime.stats import CopyTotals

_PART_BLOCKS = 32  # blocks that ranks agree on together, and lose together if one cannot be read on a rank
_MOST_SECONDS = 30.0  # of a reading; a disk that takes longer hangs
_MAX_WRITTEN = 1024  # blocks of a transfer; the files' queues hold 4,096
# Reads at a time, besides a write of blocks and one of states. A message carries the progress of the oldest seven
# transfers, and loads from host memory must not wait for writes.
_MAX_READS = 3
_CLOSE_SECONDS = 10.0  # limit of the time for writes at the end
_POLL_SECONDS = 1e-3
_logger = logging.getLogger(__name__)


class Readiness(Enum):
    """The answer to whether a waiting request can be admitted."""

    READY = "host memory has everything that is worth reading"
    COMING = "its blocks are on their way from the disk"
    NO_ROOM = "host memory has no room for its blocks"


@dataclass(eq=False)
class Reading:
    """Blocks and a state of one waiting request, on their way from the disk or kept in host memory for it.

    Attributes:
        start: Seconds at its beginning, on the first rank's clock.
        num_left: Number of parts on their way.
        kept: Keys of blocks, and of states, that host memory keeps for the request.
        is_wanted: Whether the request still waits.
    """

    start: float
    num_left: int = 0
    kept: tuple[list[bytes], list[bytes]] = field(default_factory=lambda: ([], []))
    is_wanted: bool = True


class Part(NamedTuple):
    """Some blocks of a reading, or its state."""

    reading: Reading
    places: Sequence[Place]
    is_state: bool


def _tables(tier: HostTier, is_state: bool) -> tuple[SlotTable, SlotTable]:
    """Return the blocks, or the states, of host memory and of the disk."""
    return (tier.states, tier.disk.states) if is_state else (tier.blocks, tier.disk.blocks)


class DiskReads:
    """The readings of waiting requests.

    A request whose next blocks are on the disk waits until all ranks have read them, or have failed to. Then they are
    blocks of host memory, which are kept until the request runs or ends. What a rank cannot read is forgotten on all
    ranks, and the request computes it. While a disk hangs, no request waits for any.

    Args:
        reuse: Search for a request's blocks.
        tier: Content of host memory and of the disk.
    Attributes:
        queue: Parts whose transfers are yet to begin.
    """

    def __init__(self, reuse: PrefixReuse, tier: HostTier) -> None:
        self._reuse, self._tier = reuse, tier
        self.reset()

    def reset(self) -> None:
        """Forget all readings, of a scheduler without requests."""
        self.queue: deque[Part] = deque()
        self._readings: dict[Request, Reading] = {}  # each request's own
        self._awaited: dict[Request, Reading] = {}  # readings of others that requests wait for
        self._under_way: dict[Reading, None] = {}  # the oldest first
        self._coming: dict[tuple[bool, bytes | None], Reading] = {}  # whether it is a state, and its key
        self._logged = set[str]()  # reasons for which requests compute what the disk has

    def check(self, request: Request, now: float, is_idle: bool) -> Readiness:
        """Return whether a waiting request can be admitted; begin to read blocks that are worth it.

        Args:
            now: Seconds on the first rank's clock, the same on all ranks.
            is_idle: Whether no request runs. Then none waits for room that only the end of a reading can make.
        """
        if not len(self._tier.disk.blocks) and not self._readings:
            return Readiness.READY
        if self._under_way and now - next(iter(self._under_way)).start > _MOST_SECONDS:
            return self._without_disk(f"a reading has taken longer than {_MOST_SECONDS:g} s")
        reading = self._readings.get(request)
        if reading is not None:
            return Readiness.COMING if reading.num_left else Readiness.READY
        awaited = self._awaited.pop(request, None)
        if awaited is None or not awaited.num_left:
            content = self._reuse.find_with_disk(request, self._limit)
            if content is None:
                return Readiness.READY
            awaited = self._find_coming(content)
            if awaited is None:
                if self._begin(request, content, now):
                    return Readiness.COMING
                if is_idle and not self._coming:
                    return self._without_disk("host memory has no room for it (--kv-offloading-size)")
                return Readiness.NO_ROOM
        self._awaited[request] = awaited
        return Readiness.COMING

    def _without_disk(self, reason: str) -> Readiness:
        """Let a request be admitted that computes what the disk may have; log the reason."""
        level = logging.DEBUG if reason in self._logged else logging.INFO
        self._logged.add(reason)
        _logger.log(level, "the disk is not read for a request, whose tokens are computed: %s", reason)
        return Readiness.READY

    def release(self, request: Request) -> None:
        """Keep nothing in host memory for a request any more, which runs or has ended."""
        self._awaited.pop(request, None)
        reading = self._readings.pop(request, None)
        if reading is not None:
            reading.is_wanted = False
            for is_state, keys in zip((False, True), reading.kept, strict=True):
                _tables(self._tier, is_state)[0].release(keys)

    def end(self, part: Part, has_arrived: bool) -> None:
        """Note on all ranks that a part has been read, or that a rank has failed to."""
        reading, (host, disk) = part.reading, _tables(self._tier, part.is_state)
        for key, _, host_slot in part.places:
            del self._coming[part.is_state, key]
            disk.release([key])
            if has_arrived:
                host.put(key, host_slot)
            else:
                host.free(host_slot)
                disk.remove(key)
        if has_arrived and reading.is_wanted:
            self._keep(reading, [place.key for place in part.places], part.is_state)
        reading.num_left -= 1
        if not reading.num_left:
            del self._under_way[reading]

    @property
    def _limit(self) -> int:
        """Return the blocks of host memory that readings may keep; writes to the disk keep the others."""
        return self._tier.blocks.num_slots - _writing_limit(self._tier.blocks)

    def _find_coming(self, content: Found) -> Reading | None:
        """Return another request's reading, under way, of some of the content; None without one."""
        keys = [*((False, key) for key in content.keys), (True, content.state_key)]
        return next((self._coming[each] for each in keys if each in self._coming), None)

    def _begin(self, request: Request, content: Found, now: float) -> bool:
        """Begin to read; return whether host memory has room."""
        tier, states = self._tier, [] if content.state_key is None else [content.state_key]
        num_kept = sum(len(reading.kept[False]) for reading in self._readings.values())
        if num_kept + len(self._coming) + len(content.keys) > self._limit:
            return False
        tier.touch(content.keys)
        self._readings[request] = reading = Reading(now)
        parts, num_missing = list[Part](), 0
        for is_state, keys in ((False, content.keys), (True, states)):
            host, disk = _tables(tier, is_state)
            self._keep(reading, [key for key in keys if key in host], is_state)
            places = _take(host, disk, keys)
            num_missing += len(keys) - len(reading.kept[is_state]) - len(places)
            starts = range(0, len(places), _PART_BLOCKS)
            parts += [Part(reading, places[at : at + _PART_BLOCKS], is_state) for at in starts]
        if num_missing:
            for part in parts:
                for place in part.places:
                    _tables(tier, part.is_state)[0].free(place.host_slot)
            self.release(request)
            return False
        for part in parts:
            _tables(tier, part.is_state)[1].hold(place.key for place in part.places)
            self._coming |= dict.fromkeys(((part.is_state, place.key) for place in part.places), reading)
        self.queue += parts
        reading.num_left = len(parts)
        self._under_way[reading] = None
        return True

    def _keep(self, reading: Reading, keys: Sequence[bytes], is_state: bool) -> None:
        """Keep content of host memory for a reading's request."""
        _tables(self._tier, is_state)[0].hold(keys)
        reading.kept[is_state].extend(keys)


def _take(host: SlotTable, disk: SlotTable, keys: Sequence[bytes]) -> list[Place]:
    """Return places for content that the disk has and host memory lacks, until host memory is full."""
    places: list[Place] = []
    for key in keys:
        if key in host:
            continue
        slot = host.take()
        if slot is None:
            break
        places.append(Place(key, disk.slots([key])[0], slot))
    return places


def _writing_limit(host: SlotTable) -> int:
    """Return the slots of host memory that writes to the disk may keep at a time."""
    return max(1, host.num_slots // 4)


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

    def take(self) -> list[Place]:
        """Return places of content to write next, whose host memory is kept until `end`; none before that."""
        places: list[Place] = []
        limit = 0 if self._writing else min(_MAX_WRITTEN, _writing_limit(self._host))
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

    def end(self, places: Sequence[Place], is_written: bool) -> None:
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
        self._writers = [_Writer(*_tables(self._tier, is_state)) for is_state in (False, True)]
        self._moves: dict[DiskMove, Callable[[bool], None]] = {}  # under way, with the functions of their ends
        self._num_reads = 0
        self.loaded, self.stored = CopyTotals(), CopyTotals()

    def add(self, keys: Sequence[bytes], is_state: bool = False) -> None:
        """Note blocks, or states, that are being copied to host memory."""
        for key in keys:
            self._writers[is_state].add(key)

    def begin(self) -> None:
        """Begin transfers: reads that requests wait for, and writes."""
        while self._reads.queue and self._num_reads < _MAX_READS:
            part = self._reads.queue.popleft()
            self._num_reads += 1
            self._move(part.places, part.is_state, True, partial(self._end_read, part))
        for is_state, writer in zip((False, True), self._writers, strict=True):
            if places := writer.take():
                self._move(places, is_state, False, partial(writer.end, places))

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

    def _end_read(self, part: Part, has_arrived: bool) -> None:
        self._num_reads -= 1
        self._reads.end(part, has_arrived)

    def _move(self, places: Sequence[Place], is_state: bool, is_read: bool, on_end: Callable[[bool], None]) -> None:
        """Begin a transfer of blocks, or of states.

        Args:
            on_end: Function that is called on all ranks once it has ended, with whether it has succeeded on all.
        """
        files, memory_of, num_bytes = self._files.blocks, self._memory.block, self._memory.block_bytes
        if is_state:
            assert self._files.states is not None
            files, memory_of, num_bytes = self._files.states, self._memory.state, self._memory.state_bytes
        begin, totals = (files.read, self.loaded) if is_read else (files.write, self.stored)

        def start(place: Place) -> Transfer:
            return begin(place.disk_slot, place.key, memory_of(place.host_slot))

        def end(has_succeeded: bool) -> None:
            del self._moves[move]
            if has_succeeded:
                totals.add(move, 0 if is_state else len(places))
            on_end(has_succeeded)

        move = DiskMove(places, self._memory.last_store, start, num_bytes)
        self._moves[move] = end
        self._progress.watch(move, end)

    def _wait(self, deadline: float) -> bool:
        """Wait for all transfers under way on this rank; return whether all have ended by then."""
        while not all([move.is_done for move in self._moves]):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True
