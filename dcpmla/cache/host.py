"""A rank's host memory for blocks and states, and the copies between it and the cache (`HostMemory`)."""

from collections import deque
from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from dcpmla.cache.copies import Copy, Parts
from dcpmla.cache.disk_files import DiskFiles
from dcpmla.cache.host_rows import Pack, pack_layers, runs
from dcpmla.cache.layers import Cache
from dcpmla.upload import upload

# Bytes of a part of a copy. The small copies of steps wait for a part, and the host launches each part.
PART_BYTES = 1 << 24
_MOST_QUEUED = 32  # parts of loads; 10 ms of PCIe's rate, in which the host comes back to queue more


class HostMemory:
    """Host memory for blocks and states. Copies run on two streams of their own, one in each direction.

    A copy begins after all work that is queued on the current stream. Stores run in the order of the calls, and loads
    begin after the stores before them. Loads are queued part by part (`advance`), so that the host launches steps
    meanwhile. So nothing may be stored in a slot before loads from it have ended.

    Args:
        cache: Cache of this rank.
    Attributes:
        block_bytes, state_bytes: Bytes of host memory for a block and for a state; 0 for caches without states.
        disk: Files on this rank's disk, which keep copies of blocks and states; None without.
        is_cuda: Whether the cache is on a GPU.
    """

    disk: DiskFiles | None = None

    def __init__(self, cache: Cache) -> None:
        shared = [Pack([rows.blocks], -1) for rows in cache.shared_rows]
        self._blocks, self._states = [*shared, *pack_layers(cache.block_items)], Pack(cache.state_items, -1)
        self.block_bytes, self.state_bytes = sum(pack.row_bytes for pack in self._blocks), self._states.row_bytes
        self._device = device = cache.tensors[0].device
        self.is_cuda = device.type == "cuda"
        self._store_stream, self._load_stream = (torch.cuda.Stream(device) if self.is_cuda else None for _ in range(2))
        width = max([PART_BYTES, self.state_bytes, *(pack.row_bytes for pack in self._blocks)])
        self._store_staging, self._load_staging = torch.empty(2, width, dtype=torch.uint8, device=device)
        # A state changes with the next step, so it is first copied on the current stream.
        self._state = torch.empty(1, self.state_bytes, dtype=torch.uint8, device=device)
        self._last_store, self._last_state = Copy(), Copy()
        self._loads: deque[Copy] = deque()  # whose parts are not all queued
        self._queued: deque[torch.cuda.Event] = deque()  # after each part of loads under way

    def allocate(self, num_blocks: int, num_states: int) -> None:
        """Allocate host memory for so many blocks and states.

        Raises:
            ValueError: The host has too little memory, or does not pin as much.
        """
        for pack in self._blocks:
            pack.allocate(num_blocks, self.is_cuda)
        self._states.allocate(num_states, self.is_cuda)

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> Copy:
        """Copy blocks into slots. What writes to the blocks waits for the copy (`Copy.wait`)."""
        parts = chain.from_iterable(self._store(pack, blocks, slots) for pack in self._blocks)
        self._last_store = Copy(parts, self._store_stream, len(blocks) * self.block_bytes)
        self._last_store.queue()
        return self._last_store

    @property
    def last_store(self) -> Copy:
        """Return the last copy into host memory. When it has ended, all earlier ones have."""
        return self._last_store

    def block(self, slot: int) -> list[memoryview]:
        """Return the memory of a slot for a block."""
        return [memoryview(pack.rows[slot].numpy().data) for pack in self._blocks]

    def state(self, slot: int) -> list[memoryview]:
        """Return the memory of a slot for a state."""
        return [memoryview(self._states.rows[slot].numpy().data)]

    def store_state(self, state: int, slot: int) -> None:
        """Copy a state into a slot. Later work on the current stream may write to the state."""
        self._last_state.wait()  # it has read the staging memory then
        (number,) = upload([np.array([state])], self._device)
        self._states.read(number, self._state)
        self._last_store = self._last_state = Copy(self._store_staged(slot), self._store_stream, self.state_bytes)
        self._last_store.queue()

    def load(self, blocks: Sequence[int], slots: Sequence[int], state: tuple[int, int] | None = None) -> Copy:
        """Copy slots into blocks, layer by layer, after a slot of states into a state, (slot, number), if there is one.

        What reads or writes the blocks and the state waits for the copy (`Copy.wait`, `Copy.wait_by_layer`).
        """
        self._last_store.wait(self._load_stream)
        parts = [] if state is None else [self._load(self._states, [state[1]], [state[0]])]
        parts += [self._load(pack, blocks, slots) for pack in self._blocks if blocks]
        num_bytes = len(blocks) * self.block_bytes + (state is not None) * self.state_bytes
        copy = Copy(chain.from_iterable(parts), self._load_stream, num_bytes)
        self._loads.append(copy)
        self.advance()
        return copy

    def advance(self) -> None:
        """Queue parts of loads until enough are under way."""
        while self._queued and self._queued[0].query():
            self._queued.popleft()
        while self._loads and len(self._queued) < _MOST_QUEUED:
            event = self._loads[0].queue_part()
            if event is None:
                self._loads.popleft()
            else:
                self._queued.append(event)

    def _store(self, pack: Pack, blocks: Sequence[int], slots: Sequence[int]) -> Parts:
        for items, part in self._divide(pack, blocks, slots):
            staged = self._store_staging[: len(part) * pack.row_bytes].view(len(part), -1)
            pack.read(items, staged)
            targets, sources = zip(*((pack.rows[places], staged[rows]) for rows, places in runs(part)), strict=True)
            torch._foreach_copy_(list(targets), list(sources), non_blocking=True)
            yield None

    def _store_staged(self, slot: int) -> Parts:
        self._states.rows[slot].copy_(self._state[0], non_blocking=True)
        yield None

    def _load(self, pack: Pack, items: Sequence[int], slots: Sequence[int]) -> Parts:
        num_left = len(slots)
        for there, part in self._divide(pack, items, slots):
            staged = self._load_staging[: len(part) * pack.row_bytes].view(len(part), -1)
            targets, sources = zip(*((staged[rows], pack.rows[places]) for rows, places in runs(part)), strict=True)
            torch._foreach_copy_(list(targets), list(sources), non_blocking=True)
            pack.write(there, staged)
            num_left -= len(part)
            yield None if num_left else pack.last_layer

    def _divide(self, pack: Pack, items: Sequence[int], slots: Sequence[int]) -> list[tuple[Tensor, list[int]]]:
        """Return items and slots in parts, in the order of slots: the longer the runs, the fewer copies."""
        order = np.argsort(slots, kind="stable")
        sorted_slots = np.asarray(slots)[order].tolist()
        (there,) = upload([np.asarray(items, dtype=np.int64)[order]], self._device)
        size = max(1, PART_BYTES // pack.row_bytes)
        parts = [slice(start, start + size) for start in range(0, len(slots), size)]
        return [(there[part], sorted_slots[part]) for part in parts]
