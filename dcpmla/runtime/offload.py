"""Blocks and states between the cache and the tiers below it, host memory and disks (`Offload`)."""

from contextlib import suppress
from typing import NamedTuple

from dcpmla.cache.copies import Copy
from dcpmla.cache.host import HostMemory
from dcpmla.cache.layers import Cache
from dcpmla.runtime.batch import Batch
from dcpmla.runtime.disk_offload import DiskOffload
from dcpmla.runtime.progress import Loading, Progress
from dcpmla.runtime.request import Request
from dcpmla.runtime.reuse import StateCopy
from dcpmla.runtime.scheduler import Scheduler
from dcpmla.runtime.stats import CopyTotals

_STORED_TOGETHER = 32  # blocks; a step with a few full blocks would spend more time on launches than on copies


class _UnderWay(NamedTuple):
    """A copy under way, the totals that it counts in with its number of blocks, and the blocks that it reads, by their
    keys.
    """

    copy: Copy
    totals: CopyTotals
    num_blocks: int
    blocks: dict[bytes, int]


class Offload:
    """The tiers of memory below an engine's cache.

    Full blocks are stored together, at the latest before they are overwritten. A request that finds blocks or a state
    in host memory waits until they have arrived while others run; if there is nothing else to run, its step starts at
    once, and each layer waits for its part.

    Args:
        memory: Host memory of this rank.
        cache: Cache of this rank.
        scheduler: Scheduler over the cache's blocks and the content of host memory.
        progress: Transfers that all ranks agree on.
    Attributes:
        loaded, stored: Totals of copies from and to host memory that have ended.
        disk: Transfers between host memory and the disk; None without.
    """

    def __init__(self, memory: HostMemory, cache: Cache, scheduler: Scheduler, progress: Progress) -> None:
        self.tier, self._memory, self._cache, self._allocator = scheduler.tier, memory, cache, scheduler.allocator
        self._progress = progress
        self.disk = None if scheduler.reads is None else DiskOffload(memory, scheduler.tier, scheduler.reads, progress)
        self.loaded, self.stored = CopyTotals(), CopyTotals()
        self._under_way: list[_UnderWay] = []

    def begin(self, batch: Batch) -> None:
        """Store blocks that a scheduled step may overwrite, and start its loads and the disk's transfers.

        Without anything to compute, all full blocks are stored, so that they reach the disk.
        """
        self.count()
        self._memory.advance()
        is_idle = self.disk is not None and not batch.pieces
        if is_idle or self.tier.is_overwritten(self._allocator):
            self._store()
        for copy, *_, blocks in self._under_way:
            if any(self._allocator.find([key]) != [block] for key, block in blocks.items()):
                copy.wait()
        for request in batch.loads:
            self._load(request)
        if self.disk is not None:
            self.disk.begin()

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
            if self.disk is not None:
                self.disk.add([state.key], is_state=True)

    def totals(self) -> dict[tuple[str, str], CopyTotals]:
        """Return the totals of transfers by tier ("host", "disk") and direction ("load", "store")."""
        self.count()
        tiers: dict[str, Offload | DiskOffload] = {"host": self}
        if self.disk is not None:
            tiers["disk"] = self.disk
        return {
            (name, direction): total
            for name, tier in tiers.items()
            for direction, total in (("load", tier.loaded), ("store", tier.stored))
        }

    def close(self) -> None:
        """Write all blocks to the disk, if there is one."""
        if self.disk is not None:
            with suppress(RuntimeError):  # a device that has failed: the job ends with that error
                self._store()
                self.disk.close()

    def reset(self) -> None:
        """Forget all content, of an engine without requests."""
        self.tier.reset()
        self._progress.reset()
        if self.disk is not None:
            self.disk.reset()
        self._under_way.clear()
        self.loaded, self.stored = CopyTotals(), CopyTotals()

    def _store(self) -> None:
        blocks, slots, keys = self.tier.take_pending()
        if blocks:
            copy = self._memory.store(blocks, slots)
            self._under_way.append(_UnderWay(copy, self.stored, len(keys), dict(zip(keys, blocks, strict=True))))
        if self.disk is not None:
            self.disk.add(keys)

    def _load(self, request: Request) -> None:
        loading = request.loading
        assert loading is not None
        tier = self.tier
        slots, state = tier.blocks.slots(loading.keys), None
        if loading.state is not None:
            key, number = loading.state
            state = tier.states.slots([key])[0], number
        loading.copy = copy = self._memory.load(loading.blocks, slots, state)
        self._under_way.append(_UnderWay(copy, self.loaded, len(slots), {}))
        self._progress.watch(copy, lambda _: self._end(loading))

    def _end(self, loading: Loading) -> None:
        """Note on all ranks that a load has ended."""
        loading.has_ended = True
        self.tier.blocks.release(loading.keys)
        if loading.state is not None:
            self.tier.states.release([loading.state[0]])

    def count(self) -> None:
        """Add the copies that have ended to the totals."""
        for each in [each for each in self._under_way if each.copy.is_done]:
            self._under_way.remove(each)
            each.totals.add(each.copy, each.num_blocks)
