"""Blocks and states between the cache and host memory (`Offload`)."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from dcpmla.cache.copies import Copy
from dcpmla.cache.host import HostMemory
from dcpmla.cache.plan import Cache
from dcpmla.runtime.batch import Batch
from dcpmla.runtime.progress import Progress
from dcpmla.runtime.request import Request
from dcpmla.runtime.reuse import StateCopy
from dcpmla.runtime.scheduler import Scheduler
from dcpmla.runtime.stats import TierTotals

_STORED_TOGETHER = 32  # blocks; a step with a few full blocks would spend more time on launches than on copies


@dataclass
class _Stored:
    """Blocks that a copy under way reads, by their keys."""

    copy: Copy
    blocks: dict[bytes, int] = field(default_factory=dict)


class Offload:
    """The host memory of an engine.

    Full blocks are stored together, at the latest before they are overwritten. A request that finds blocks or a state
    in host memory waits until they have arrived while others run; if there is nothing else to run, its step starts at
    once, and each layer waits for its part.

    Args:
        memory: Host memory of this rank.
        cache: Cache of this rank.
        scheduler: Scheduler over the cache's blocks and the content of host memory.
        progress: Transfers that all ranks agree on.
    Attributes:
        totals: Blocks, bytes and seconds of copies on this rank.
    """

    def __init__(self, memory: HostMemory, cache: Cache, scheduler: Scheduler, progress: Progress) -> None:
        self.tier, self._memory, self._cache, self._allocator = scheduler.tier, memory, cache, scheduler.allocator
        self._progress = progress
        self.totals = TierTotals()
        self._stored: list[_Stored] = []  # under way
        self._loads: list[Copy] = []  # under way

    def begin(self, batch: Batch) -> None:
        """Store blocks that a scheduled step may overwrite, and start its loads."""
        self._count()
        if self.tier.is_overwritten(self._allocator):
            self._store()
        for stored in self._stored:
            if any(self._allocator.find([key]) != [block] for key, block in stored.blocks.items()):
                stored.copy.wait()
        for request in batch.loads:
            self._load(request)

    def prepare(self, batch: Batch, waits_by_layer: bool) -> None:
        """Store full blocks of earlier steps, and let the step wait for the loads of its requests.

        Args:
            waits_by_layer: Whether the step's layers wait for their parts (`Cache.loads`).
        """
        if self.tier.num_pending >= _STORED_TOGETHER:
            self._store()
        for piece in batch.pieces:
            loading, piece.request.loading = piece.request.loading, None
            if loading is None:
                continue
            assert isinstance(loading.copy, Copy)
            if waits_by_layer and not loading.has_ended:
                loading.copy.wait_by_layer(self._cache.loads)
            else:
                loading.copy.wait()

    def finish(self) -> None:
        """Let later work wait for parts of loads that no layer of the launched step has waited for."""
        for loads in self._cache.loads:
            while loads:
                loads.pop().wait()

    def store_state(self, state: StateCopy) -> None:
        """Store a request's state, unless it is known."""
        states = self.tier.states
        slot = None if state.key in states else states.add(state.key)
        if slot is not None:
            self._memory.store_state(state.source, slot)

    def reset(self) -> None:
        """Forget all content, of an engine without requests."""
        self.tier.reset()
        self._stored.clear()
        self.totals = TierTotals()

    def _store(self) -> None:
        blocks, slots, keys = self.tier.take_pending()
        if blocks:
            copy = self._memory.store(blocks, slots)
            self._stored.append(_Stored(copy, dict(zip(keys, blocks, strict=True))))

    def _load(self, request: Request) -> None:
        loading = request.loading
        assert loading is not None
        tier = self.tier
        slots, state = tier.blocks.slots(loading.keys), None
        if loading.state is not None:
            key, number = loading.state
            state = tier.states.slots([key])[0], number
            tier.states.release([key])
        tier.blocks.release(loading.keys)
        loading.copy = copy = self._memory.load(loading.blocks, slots, state)
        self._loads.append(copy)
        self._progress.watch(copy, loading.end)
        self.totals.num_loaded_blocks += len(slots)
        self.totals.loaded_bytes += copy.num_bytes

    def _count(self) -> None:
        """Count the copies that have ended."""
        for copy in _take_done(self._loads):
            self.totals.load_seconds += copy.seconds
        for stored in [each for each in self._stored if each.copy.is_done]:
            self._stored.remove(stored)
            self.totals.stored_bytes += stored.copy.num_bytes
            self.totals.store_seconds += stored.copy.seconds


def _take_done(copies: list[Copy]) -> Iterable[Copy]:
    done = [copy for copy in copies if copy.is_done]
    copies[:] = [copy for copy in copies if copy not in done]
    return done
