"""The speeds of this machine that decide between loading cached tokens and computing them again.

They are measured at the start of an engine with host memory: a copy between host memory and the cache, reads of the
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

_COPIED_BYTES, _READ_BYTES = 1 << 26, 1 << 24  # of the larger copy, and of the larger reads of a disk
_SHORT_TOKENS, _LONG_TOKENS = 16, {"cuda": 2048, "cpu": 128}  # of the prompts
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
        copy: Time of a copy from host memory into the cache, by bytes.
        read: Time of reads from the disk into host memory, by bytes; 0 without a disk.
        prefill: Time of a prefill alone, by the microseconds of the planner's model, whatever device it is of.
    """

    copy: Line
    read: Line
    prefill: Line

    def costs(self, plan: CachePlan, pieces: PrefillCosts, max_num_batched_tokens: int, logs: bool) -> list[TierCosts]:
        """Return the costs of loads from host memory, and of loads from the disk through host memory.

        Args:
            pieces: Modelled time of pieces of prompts.
            logs: Whether to log the first request whose tokens are computed although a tier has them.
        """
        through_host = Line(self.copy.start + self.read.start, self.copy.slope + self.read.slope)

        def prefill_us(num_tokens: int, context: int) -> float:
            # The tokens of a full step share the time that a step takes with few tokens, too.
            share = num_tokens / max_num_batched_tokens
            return self.prefill.slope * pieces.piece_us(num_tokens, context) + self.prefill.start * share

        def costs_of(tier: str, line: Line) -> TierCosts:
            gb_per_s = 1e-3 / line.slope if line.slope else float("inf")
            return TierCosts(plan, line.start, gb_per_s, prefill_us, _Refusals(tier).log if logs else _log_nothing)

        return [costs_of("host memory", self.copy), costs_of("the disk", through_host)]


class _Refusals:
    """The requests whose tokens are computed although a tier has them; the first one is logged."""

    def __init__(self, tier: str) -> None:
        self._tier, self._is_logged = tier, False

    def log(self, num_tokens: int, load_us: float, prefill_us: float) -> None:
        """Log the times of a load and of the prefill that is chosen, once."""
        if self._is_logged:
            return
        self._is_logged = True
        _logger.warning(
            "%s has %d tokens of a request, but loading them takes %.2f ms and computing them again %.2f ms, by the "
            "speeds measured at the start, so they are computed; further requests are not logged",
            self._tier,
            num_tokens,
            load_us / 1e3,
            prefill_us / 1e3,
        )


def _log_nothing(num_tokens: int, load_us: float, prefill_us: float) -> None:
    """Log nothing: another rank does."""


def measure(
    plan: CachePlan,
    memory: HostMemory,
    num_slots: int,
    folder: DiskFolder | None,
    engine: Engine | None,
    pieces: PrefillCosts,
    mesh: DCPMesh,
) -> TierSpeeds:
    """Measure the speeds, the same on all ranks. Collective over the TP group. The cache and host memory are empty, and
    get arbitrary content.

    Args:
        num_slots: Number of blocks that host memory holds.
        folder: Folder of the disk's files; None without a disk.
        engine: Engine over the cache without host memory; None where no prompt may be computed yet, so that the
            modelled time of prefills counts.
        pieces: Modelled time of pieces of prompts.
    """
    copy = _measure_copies(memory, min(plan.num_blocks, num_slots))
    read = Line(0.0, 0.0) if folder is None else _measure_reads(memory, num_slots, folder, mesh.tp_rank)
    prefill = Line(0.0, 1.0) if engine is None else _measure_prefills(engine, pieces)
    of_ranks = gather_values([*copy, *read, *prefill], mesh.tp_group, "comparing speeds")
    slowest = [float(max(column)) for column in zip(*of_ranks, strict=True)]
    return TierSpeeds(Line(*slowest[:2]), Line(*slowest[2:4]), Line(*slowest[4:]))


def _measure_copies(memory: HostMemory, num_blocks: int) -> Line:
    """Time copies of blocks from host memory into the cache."""

    def load(count: int) -> None:
        memory.load(range(count), range(count)).wait()
        memory.advance()  # It forgets the copy, whose parts are all queued.
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()

    return _measure_blocks(load, memory.block_bytes, num_blocks, _COPIED_BYTES)


def _measure_reads(memory: HostMemory, num_slots: int, folder: DiskFolder, rank: int) -> Line:
    """Time reads of blocks from a file of its own, which is removed. Without room for it the planner's rate counts."""
    claimed = folder.claim(rank, "probe")
    num_blocks = max(1, min(num_slots, _READ_BYTES // max(1, memory.block_bytes)))
    places = [Place(sha256(b"%d" % slot).digest(), slot, slot) for slot in range(num_blocks)]
    try:
        transfers = DiskTransfers(BlockFile(claimed, num_blocks, memory.block_bytes))
    except (OSError, ValueError):
        return Line(0.0, 1e-3 / H200X8.disk_gb_per_s)
    finally:
        for path in (claimed.blocks, claimed.index):
            path.unlink(missing_ok=True)

    def move(start: Callable[[int, bytes, Sequence[memoryview]], Transfer], count: int) -> None:
        def begin(place: Place) -> Transfer:
            return start(place.disk_slot, place.key, memory.block(place.host_slot))

        moved = DiskMove(places[:count], Copy(), begin, memory.block_bytes)
        while not moved.is_done:
            time.sleep(_POLL_SECONDS)

    try:
        move(transfers.write, num_blocks)
        return _measure_blocks(lambda count: move(transfers.read, count), memory.block_bytes, num_blocks, _READ_BYTES)
    finally:
        transfers.close()


def _measure_prefills(engine: Engine, pieces: PrefillCosts) -> Line:
    """Time prefills of a short and of a longer prompt. Collective over the TP group."""
    room = min(engine.max_model_len, engine.allocator.num_blocks * engine.allocator.block_tokens) - 1
    longest = min(room, engine.scheduler.max_num_batched_tokens, _LONG_TOKENS[engine.model.device.type])
    rng, vocabulary = random.Random(0), range(engine.model.vocab_size)
    params = SamplingParams(max_new_tokens=1, ignore_eos=True)

    def prefill(num_tokens: int) -> None:
        engine.add(rng.choices(vocabulary, k=num_tokens), params)
        for _ in engine.run():
            pass

    lens = {min(_SHORT_TOKENS, longest), longest}
    by_tokens = Line.through({float(num_tokens): _least_us(prefill, num_tokens) for num_tokens in lens})
    return Line(by_tokens.start, by_tokens.slope * longest / pieces.piece_us(longest, 0))


def _measure_blocks(move: Callable[[int], object], block_bytes: int, num_blocks: int, num_bytes: int) -> Line:
    """Time moves of one block, and of as many as have so many bytes, if there are as many."""
    counts = {1, max(1, min(num_blocks, num_bytes // max(1, block_bytes)))}
    return Line.through({float(count * block_bytes): _least_us(move, count) for count in counts})


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
