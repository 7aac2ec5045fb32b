"""A rank's host memory for blocks and states, and the copies between it and the cache (`HostMemory`)."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dcpmla.cache.copies import Copy
from dcpmla.cache.host_rows import Pack, pack_layers, runs
from dcpmla.cache.items import Items
from dcpmla.cache.plan import Cache
from dcpmla.upload import upload

STAGING_BYTES = 1 << 23  # of the device; a longer copy would delay the small ones of steps


class HostMemory:
    """Host memory for blocks and states. Copies run on two streams of their own, one in each direction.

    A copy begins after all work that is queued on the current stream. Copies in one direction run in the order of the
    calls, and a store begins after all loads before it, so that no slot is overwritten before it is read.

    Args:
        cache: Cache of this rank.
    Attributes:
        block_bytes, state_bytes: Bytes of host memory for a block and for a state; 0 for caches without states.
    """

    def __init__(self, cache: Cache) -> None:
        shared = [] if cache.token_ids is None else [Pack([Items.of(cache.token_ids)], -1)]
        self._blocks, self._states = [*shared, *pack_layers(cache.block_items)], Pack(cache.state_items, -1)
        self.block_bytes, self.state_bytes = sum(pack.row_bytes for pack in self._blocks), self._states.row_bytes
        self._device = device = cache.tensors[0].device
        self._is_cuda = device.type == "cuda"
        self._store_stream, self._load_stream = (torch.cuda.Stream(device) if self._is_cuda else None for _ in range(2))
        width = max([STAGING_BYTES, *(pack.row_bytes for pack in self._blocks)])
        self._staging = torch.empty(width, dtype=torch.uint8, device=device)
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
        copy, order = Copy(), np.argsort(slots)  # successive slots are copied together
        with copy.on(self._store_stream):
            self._last_load.wait()
            (items,) = upload([np.asarray(blocks, dtype=np.int64)[order]], self._device)
            for pack in self._blocks:
                self._store(pack, items, np.asarray(slots)[order].tolist())
        copy.num_bytes = len(blocks) * self.block_bytes
        self._last_store = copy
        return copy

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
            numbers = [blocks, slots, *([number] for number in state or ())]
            items, places, *of_state = upload([np.array(each, dtype=np.int64) for each in numbers], self._device)
            if of_state:
                slot, number = of_state
                self._states.load(number, slot)
                copy.end_part(self._states.last_layer)
            for pack in self._blocks if blocks else ():
                pack.load(items, places)
                copy.end_part(pack.last_layer)
        copy.num_bytes = len(blocks) * self.block_bytes + (state is not None) * self.state_bytes
        self._last_load = copy
        return copy

    def _store(self, pack: Pack, blocks: Tensor, slots: Sequence[int]) -> None:
        size = len(self._staging) // pack.row_bytes
        for start in range(0, len(slots), size):
            part = slots[start : start + size]
            staged = self._staging[: len(part) * pack.row_bytes].view(len(part), -1)
            pack.read(blocks[start : start + size], staged)
            for rows, places in runs(part):
                pack.rows[places].copy_(staged[rows], non_blocking=True)
