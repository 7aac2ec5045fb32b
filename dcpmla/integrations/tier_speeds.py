"""The speeds of this machine that decide between loading cached tokens and computing them again.

They are measured at the start of an engine with host memory: copies between host memory and the cache, reads of the
disk, and prefills of a short and of a longer prompt.
"""

import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import NamedTuple

import torch

from dcpmla.cache.copies import Copy
from dcpmla.cache.disk_file import BlockFile
from dcpmla.cache.disk_files import DiskMove, Place
from dcpmla.cache.disk_folder import DiskFolder
from dcpmla.cache.disk_transfer import DiskTransfers, Transfer
from dcpmla.cache.host import HostMemory
from dcpmla.cache.plan import CachePlan
from dcpmla.parallel.collectives import gather_values
from dcpmla.parallel.mesh import DCPMesh
from dcpmla.planning.load import TierCosts
from dcpmla.planning.machine import H200X8
from dcpmla.planning.prefill import PrefillCosts
from dcpmla.runtime.engine import Engine
from dcpmla.runtime.sampling import SamplingParams

_COPIED_BYTES, _READ_BYTES, _READ_BLOCKS = 1 << 26, 1 << 25, 32  # limits of the larger copy, and of the larger reads
_SHORT_TOKENS, _GROWTH = 16, 4  # the short prompt, and the factor from one prompt to the next longer one
# A prompt is long enough if it takes this many times the short one's time: then noise hardly changes the slope.
_LONG_SHARE = 3
_NUM_REPEATS = 4
_POLL_SECONDS = 1e-4

_logger = logging.getLogger(__name__)


class Line(NamedTuple):
    """A time that grows with a size.

    Attributes:
        start: Microseconds at size 0.
        slope: Microseconds for each unit of the size.
    """

    start: float
    slope: float

    @property
    def gb_per_s(self) -> float:
        """Return the rate of large sizes, which are bytes."""
        return 1e-3 / self.slope if self.slope else float("inf")

    @classmethod
    def through(cls, times: Mapping[float, float]) -> "Line":
        """Return the line through the times, in microseconds, of one size or of two."""
        (small, first), (large, last) = min(times.items()), max(times.items())
        if small == large:
            return cls(0.0, first / small) if small else cls(first, 0.0)
        slope = max(0.0, last - first) / (large - small)
        return cls(max(0.0, first - slope * small), slope)


class TierSpeeds(NamedTuple):
    """The speeds of a machine, of its slowest rank.

    Attributes:
        copy: Time of a copy from host memory into the cache, by bytes of the cache.
        read: Time of reads from the disk into host memory, by bytes of the cache; 0 without a disk.
        prefill: Time of a prefill alone, by tokens.
        num_tokens: Number of tokens of the longest prefill that was timed.
    """

    copy: Line
    read: Line
    prefill: Line
    num_tokens: int

    def costs(self, plan: CachePlan, pieces: PrefillCosts, max_num_batched_tokens: int, logs: bool) -> list[TierCosts]:
        """Return the costs of loads from host memory, and of loads from the disk through host memory.

        Args:
            pieces: Modelled time of pieces of prompts. Only its growth with contexts counts, scaled to this machine:
                in small models launches, whose number is constant, hide the time of tokens.
            max_num_batched_tokens: Limit of a step's tokens, which share the time that a step takes with few tokens.
            logs: Whether to log the speeds, and requests whose tokens are computed although a tier has them.
        """
        longest, (step_us, token_us) = self.num_tokens, self.prefill
        scale = token_us * longest / pieces.piece_us(longest, 0)
        through_host = Line(self.copy.start + self.read.start, self.copy.slope + self.read.slope)

        def prefill_us(num_tokens: int, context: int) -> float:
            measured = pieces.piece_us(min(num_tokens, longest), 0) * max(1.0, num_tokens / longest)
            growth = max(0.0, pieces.piece_us(num_tokens, context) - measured)
            return num_tokens * (token_us + step_us / max_num_batched_tokens) + scale * growth

        def costs_of(tier: str, line: Line) -> TierCosts:
            return TierCosts(plan, line.start, line.gb_per_s, prefill_us, _Refusals(tier).log if logs else None)

        if logs:
            of_disk = f", {through_host.gb_per_s:.2f} GB/s from the disk" if any(self.read) else ""
            words = "measured on a rank: loads of blocks at %.2f GB/s from host memory%s, prefills at %.1f us a token"
            _logger.info(words, self.copy.gb_per_s, of_disk, token_us)
        return [costs_of("host memory", self.copy), costs_of("the disk", through_host)]


class _Refusals:
    """The requests whose tokens are computed although a tier has them. They are logged, the first one as a warning."""

    def __init__(self, tier: str) -> None:
        self._tier, self._is_logged = tier, False

    def log(self, num_tokens: int, load_us: float, prefill_us: float) -> None:
        """Log the times of a load and of the prefill that is chosen."""
        level, self._is_logged = logging.DEBUG if self._is_logged else logging.WARNING, True
        _logger.log(
            level,
            "%s has %d tokens of a request, but loading them takes %.2f ms and computing them again %.2f ms, by the "
            "speeds measured at the start, so they are computed; later requests are logged at the level debug",
            self._tier,
            num_tokens,
            load_us / 1e3,
            prefill_us / 1e3,
        )


def measure(
    plan: CachePlan,
    memory: HostMemory,
    num_slots: int,
    folder: DiskFolder | None,
    prefill: Callable[[int], object],
    max_tokens: int,
    mesh: DCPMesh,
) -> TierSpeeds:
    """Measure the speeds, the same on all ranks. Collective over the TP group. The cache and host memory are empty, and
    get arbitrary content.

    Args:
        num_slots: Number of blocks that host memory holds.
        folder: Folder of the disk's files; None without a disk.
        prefill: Function that prefills a number of tokens in one step, up to max_tokens. Collective over the TP group.
    """

    def slowest(times: Sequence[float]) -> list[float]:
        of_ranks = gather_values([*times], mesh.tp_group, "comparing speeds")
        return [float(max(column)) for column in zip(*of_ranks, strict=True)]

    copy = Line(*slowest(_measure_copies(plan, memory, num_slots)))
    read = Line(0.0, 0.0)
    if folder is not None:
        read = Line(*slowest(_measure_reads(plan, memory, num_slots, folder, mesh.tp_rank)))

    def run(num_tokens: int) -> None:
        prefill(num_tokens)
        _finish(memory)

    lens = [min(_SHORT_TOKENS, max_tokens)]
    times = slowest([_least_us(run, lens[0])])
    while lens[-1] < max_tokens and times[-1] < _LONG_SHARE * times[0]:
        lens.append(min(_GROWTH * lens[-1], max_tokens))
        times += slowest([_least_us(run, lens[-1])])
    # The time of a single size is the step's: more tokens need more steps.
    line = Line.through({lens[0]: times[0], lens[-1]: times[-1]}) if len(lens) > 1 else Line(times[0], 0.0)
    return TierSpeeds(copy, read, line, lens[-1])


def prefills(engine: Engine) -> tuple[Callable[[int], object], int]:
    """Return a function that prefills a number of tokens with an engine, and the limit of the number."""
    room = min(engine.max_model_len, engine.allocator.num_blocks * engine.allocator.block_tokens) - 1
    rng, vocabulary = random.Random(0), range(engine.model.vocab_size)
    params = SamplingParams(max_new_tokens=1, ignore_eos=True)

    def prefill(num_tokens: int) -> None:
        engine.add(rng.choices(vocabulary, k=num_tokens), params)
        for _ in engine.run():
            pass

    return prefill, min(room, engine.scheduler.max_num_batched_tokens)


def _measure_copies(plan: CachePlan, memory: HostMemory, num_slots: int) -> Line:
    """Time copies of blocks, with a state if there are any, from host memory into the cache."""
    most = _most_blocks(memory, min(plan.num_blocks, num_slots), _COPIED_BYTES)
    state = (0, 0) if memory.state_bytes else None
    # Host memory that nothing has been written to is read faster on CPUs.
    memory.store(range(most), range(most)).wait()
    if state is not None:
        memory.store_state(*state)

    def load(count: int) -> None:
        memory.load(range(count), range(count), state).wait()
        memory.advance()  # It forgets the copy, whose parts are all queued.
        _finish(memory)

    times = {count: _least_us(load, count) for count in (1, most)}
    return Line.through({plan.bytes_per_block * count + plan.bytes_per_state: us for count, us in times.items()})


def _measure_reads(plan: CachePlan, memory: HostMemory, num_slots: int, folder: DiskFolder, rank: int) -> Line:
    """Time reads of blocks from a file of its own, which is removed. Without room for it the planner's rate counts."""
    most = _most_blocks(memory, min(num_slots, _READ_BLOCKS), _READ_BYTES)
    places = [Place(sha256(b"%d" % slot).digest(), slot, slot) for slot in range(most)]
    try:
        claimed = folder.claim(rank, "probe")
        try:
            transfers = DiskTransfers(BlockFile(claimed, most, memory.block_bytes))
        finally:
            claimed.remove()
    except (OSError, ValueError):
        return Line(0.0, 1e-3 / H200X8.disk_gb_per_s)

    def move(start: Callable[[int, bytes, Sequence[memoryview]], Transfer], count: int) -> None:
        def begin(place: Place) -> Transfer:
            return start(place.disk_slot, place.key, memory.block(place.host_slot))

        moved = DiskMove(places[:count], Copy(), begin, memory.block_bytes)
        while not moved.is_done:
            time.sleep(_POLL_SECONDS)

    try:
        move(transfers.write, most)
        times = {count: _least_us(lambda count: move(transfers.read, count), count) for count in (1, most)}
    finally:
        transfers.close()
    return Line.through({float(plan.bytes_per_block * count): us for count, us in times.items()})


def _most_blocks(memory: HostMemory, num_blocks: int, num_bytes: int) -> int:
    """Return the number of blocks up to a number, and up to so many bytes of host memory, but at least one."""
    return max(1, min(num_blocks, num_bytes // max(1, memory.block_bytes)))


def _finish(memory: HostMemory) -> None:
    """Wait for all work of the device."""
    if memory.is_cuda:
        torch.cuda.synchronize()


def _least_us(run: Callable[[int], object], size: int) -> float:
    """Return the least time of several calls in microseconds, after one that does not count. Other processes delay some
    calls, and none is too fast.
    """
    run(size)
    times = []
    for _ in range(_NUM_REPEATS):
        start = time.perf_counter()
        run(size)
        times.append(1e6 * (time.perf_counter() - start))
    return min(times)
