"""A rank's host memory for blocks and states, and the copies between it and the cache (`HostMemory`)."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dcpmla.cache.copies import Copy
from dcpmla.cache.disk_files import DiskFiles
from dcpmla.cache.host_rows import Pack, pack_layers, runs
from dcpmla.cache.items import Items
from dcpmla.cache.plan import Cache
from dcpmla.upload import upload

STAGING_BYTES = 1 << 25  # of the device, in each direction


class HostMemory:
    """Host memory for blocks and states. Copies run on two streams of their own, one in each direction.

    A copy begins after all work that is queued on the current stream. Copies in one direction run in the order of the
    calls, and a store begins after all loads before it, so that no slot is overwritten before it is read.

    Args:
        cache: Cache of this rank.
    Attributes:
        block_bytes, state_bytes: Bytes of host memory for a block and for a state; 0 for caches without states.
        disk: Files on this rank's disk, which keep copies of blocks and states; None without.
    """

    disk: DiskFiles | None = None

    def __init__(self, cache: Cache) -> None:
        shared = [] if cache.token_ids is None else [Pack([Items.of(cache.token_ids)], -1)]
        self._blocks, self._states = [*shared, *pack_layers(cache.block_items)], Pack(cache.state_items, -1)
        self.block_bytes, self.state_bytes = sum(pack.row_bytes for pack in self._blocks), self._states.row_bytes
        self._device = device = cache.tensors[0].device
        self._is_cuda = device.type == "cuda"
        self._store_stream, self._load_stream = (torch.cuda.Stream(device) if self._is_cuda else None for _ in range(2))
        width = max([STAGING_BYTES, self.state_bytes, *(pack.row_bytes for pack in self._blocks)])
        self._store_staging, self._load_staging = torch.empty(2, width, dtype=torch.uint8, device=device)
        # A state changes with the next step, so it is first copied on the current stream.
        self._state = torch.empty(1, self.state_bytes, dtype=torch.uint8, device=device)
        self._last_load, self._last_store = Copy(), Copy()

    def allocate(self, num_blocks: int, num_states: int) -> None:
        """Allocate host memory for so many blocks and states.

        Raises:
            ValueError: The host has too little memory, or does not pin as much.
        """
        for pack in self._blocks:
            pack.allocate(num_blocks, self._is_cuda)
        self._states.allocate(num_states, self._is_cuda)

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> Copy:
        """Copy blocks into slots. What writes to the blocks waits for the copy (`Copy.wait`)."""
        copy = Copy()
        with copy.on(self._store_stream):
            self._last_load.wait()
            for pack in self._blocks:
                self._store(copy, pack, blocks, slots)
        self._last_store = copy
        return copy

    @property
    def last_copies(self) -> tuple[Copy, Copy]:
        """Return the last copy in each direction. When they have ended, all earlier ones have."""
        return self._last_load, self._last_store

    def block(self, slot: int) -> list[memoryview]:
        """Return the memory of a slot for a block."""
        return [memoryview(pack.rows[slot].numpy().data) for pack in self._blocks]

    def state(self, slot: int) -> list[memoryview]:
        """Return the memory of a slot for a state."""
        return [memoryview(self._states.rows[slot].numpy().data)]

    def store_state(self, state: int, slot: int) -> None:
        """Copy a state into a slot. Later work on the current stream may write to the state."""
        self._last_store.wait()
        (number,) = upload([np.array([state])], self._device)
        self._states.read(number, self._state)
        copy = Copy()
        with copy.on(self._store_stream):
            self._last_load.wait()
            self._states.rows[slot].copy_(self._state[0], non_blocking=True)
        self._last_store = copy

    def load(self, blocks: Sequence[int], slots: Sequence[int], state: tuple[int, int] | None = None) -> Copy:
        """Copy slots into blocks, layer by layer, after a slot of states into a state, (slot, number), if there is one.

        What reads or writes the blocks and the state waits for the copy (`Copy.wait`, `Copy.wait_by_layer`).
        """
        copy = Copy()
        with copy.on(self._load_stream):
            self._last_store.wait()
            if state is not None:
                self._load(copy, self._states, [state[1]], [state[0]])
            for pack in self._blocks:
                self._load(copy, pack, blocks, slots)
        self._last_load = copy
        return copy

    def _store(self, copy: Copy, pack: Pack, blocks: Sequence[int], slots: Sequence[int]) -> None:
        for items, part in self._parts(pack, blocks, slots):
            staged = self._store_staging[: len(part) * pack.row_bytes].view(len(part), -1)
            pack.read(items, staged)
            for rows, places in runs(part):
                pack.rows[places].copy_(staged[rows], non_blocking=True)
        copy.num_bytes += len(blocks) * pack.row_bytes

    def _load(self, copy: Copy, pack: Pack, blocks: Sequence[int], slots: Sequence[int]) -> None:
        for items, part in self._parts(pack, blocks, slots):
            staged = self._load_staging[: len(part) * pack.row_bytes].view(len(part), -1)
            for rows, places in runs(part):
                staged[rows].copy_(pack.rows[places], non_blocking=True)
            pack.write(items, staged)
        copy.num_bytes += len(blocks) * pack.row_bytes
        copy.end_part(pack.last_layer)

    def _parts(self, pack: Pack, items: Sequence[int], slots: Sequence[int]) -> list[tuple[Tensor, list[int]]]:
        """Return items and slots in parts that fit into the staging memory, in the order of slots: the longer the runs,
        the fewer copies.
        """
        order = np.argsort(slots, kind="stable")
        sorted_slots = np.asarray(slots)[order].tolist()
        (there,) = upload([np.asarray(items, dtype=np.int64)[order]], self._device)
        size = len(self._store_staging) // pack.row_bytes
        return [
            (there[start : start + size], sorted_slots[start : start + size]) for start in range(0, len(slots), size)
        ]
