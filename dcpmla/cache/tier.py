"""Bookkeeping of the tiers below the GPU's cache (host memory, disks): keys of blocks and states, and their slots.

Every rank of a TP group makes the same calls, so all ranks know the same content.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from dcpmla.cache.block_events import HOST, BlockEvent, Removed, Stored
from dcpmla.cache.blocks import BlockAllocator

_TOKENS_PER_STATE = 8192  # of blocks, for each slot of a state


def count_slots(num_bytes: int, block_bytes: int, state_bytes: int, block_tokens: int) -> tuple[int, int]:
    """Return how many blocks and states share a rank's bytes: a state for every 8,192 tokens of blocks, at least one.

    Args:
        num_bytes: Bytes of the tier on a rank.
        block_bytes, state_bytes: Bytes of a block, and of a state, 0 in caches without states.
        block_tokens: Tokens of a block.
    """
    if not state_bytes:
        return num_bytes // block_bytes if block_bytes else 0, 0
    blocks_per_state = max(1, _TOKENS_PER_STATE // block_tokens)
    num_states = max(1, num_bytes // (state_bytes + blocks_per_state * block_bytes))
    if not block_bytes:  # a model with windows alone, whose blocks only name what their states follow
        return num_states * blocks_per_state, num_states
    return max(0, num_bytes - num_states * state_bytes) // block_bytes, num_states


class SlotTable:
    """Slots in [0, num_slots) by the keys of their content. The least recently used content is evicted first.

    Attributes:
        events: Changes of announced content; None, the default, keeps no record of them.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))  # successive slots are copied together
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        self._holders: Counter[bytes] = Counter()
        self.events: list[BlockEvent] | None = None
        self._announced: set[bytes] = set()

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._slots)

    def slots(self, keys: Iterable[bytes]) -> list[int]:
        """Return the slots of known keys."""
        return [self._slots[key] for key in keys]

    def take(self) -> int | None:
        """Return a slot for content on its way, from older content if none is free; None if all content is held."""
        if not self._free:
            oldest = next((each for each in self._slots if each not in self._holders), None)
            if oldest is None:
                return None
            self.remove(oldest)
        return self._free.pop()

    def put(self, key: bytes, slot: int) -> None:
        """Make the content of a slot from `take` known, unless another slot has it by now."""
        if key in self._slots:
            self.free(slot)
        else:
            self._slots[key] = slot

    def free(self, slot: int) -> None:
        """Free a slot from `take` whose content has not come."""
        self._free.append(slot)

    def add(self, key: bytes) -> int | None:
        """Return a slot for new content, which is known at once; None if all content is held."""
        if (slot := self.take()) is not None:
            self._slots[key] = slot
        return slot

    def fill(self, content: Mapping[bytes, int]) -> None:
        """Make content known that an empty table's slots have, from the least to the most recently used."""
        self._slots.update(content)
        used = {*content.values()}
        self._free = [slot for slot in self._free if slot not in used]

    def remove(self, key: bytes) -> None:
        """Free the slot of a known key."""
        self._free.append(self._slots.pop(key))
        if self.events is not None and key in self._announced:
            self._announced.remove(key)
            self.events.append(Removed(key, HOST))

    def announce(self, stored: Stored) -> None:
        """Record an event of one block, if its content is known and has none yet."""
        (key,) = stored.keys
        if self.events is not None and key in self._slots and key not in self._announced:
            self._announced.add(key)
            self.events.append(stored)

    def take_events(self) -> list[BlockEvent]:
        """Return the events since the last call, the oldest first, and keep later ones."""
        events, self.events = self.events or [], []
        return events

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note that a sequence's content was used, its end before its beginning: the end is evicted first, because no
        search finds it alone.
        """
        for key in reversed(keys):
            if key in self._slots:
                self._slots.move_to_end(key)

    def expire(self, key: bytes) -> None:
        """Make content, if it is known, the next to be evicted."""
        if key in self._slots:
            self._slots.move_to_end(key, last=False)

    def hold(self, keys: Iterable[bytes]) -> None:
        """Protect content from eviction, once more for each call, until `release`."""
        self._holders.update(keys)

    def release(self, keys: Iterable[bytes]) -> None:
        """End the protection of one call of `hold`."""
        for key in keys:
            self._holders[key] -= 1
            if not self._holders[key]:  # else it would be there for ever: something is held nearly always
                del self._holders[key]


class Tier:
    """The content of one tier.

    Args:
        num_blocks, num_states: Slots for blocks and for states; 0 for none.
    """

    def __init__(self, num_blocks: int = 0, num_states: int = 0) -> None:
        self.blocks, self.states = SlotTable(num_blocks), SlotTable(num_states)

    def reset(self) -> None:
        """Forget all content."""
        self.blocks, self.states = SlotTable(self.blocks.num_slots), SlotTable(self.states.num_slots)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note that a sequence's blocks were used, and the state after them."""
        self.blocks.touch(keys)
        self.states.touch(keys[-1:])

    def expire_state(self, key: bytes) -> None:
        """Make a state, if it is known, the next to be evicted."""
        self.states.expire(key)


class HostTier(Tier):
    """The content of host memory, and blocks that are yet to be stored there.

    Args:
        num_blocks, num_states: Slots for blocks and for states; 0 for none.
        disk: Content of the disks below; None without.
    """

    def __init__(self, num_blocks: int = 0, num_states: int = 0, disk: Tier | None = None) -> None:
        super().__init__(num_blocks, num_states)
        self.disk = disk or Tier()
        self._pending: dict[bytes, int] = {}  # key -> block on the GPU
        self._stored: dict[bytes, Stored] = {}  # events of pending blocks, for when they are stored

    def reset(self) -> None:
        """Forget all content of host memory and of the disks."""
        events = self.blocks.events
        for key in [*self.blocks] if events is not None else ():
            self.blocks.remove(key)
        super().reset()
        self.blocks.events = events
        self.disk.reset()
        self._pending.clear()
        self._stored.clear()

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note in both tiers that a sequence's blocks were used, and the state after them."""
        super().touch(keys)
        self.disk.touch(keys)

    def expire_state(self, key: bytes) -> None:
        """Make a state the next to be evicted from both tiers."""
        super().expire_state(key)
        self.disk.expire_state(key)

    @property
    def num_pending(self) -> int:
        """Return the number of blocks that are yet to be stored."""
        return len(self._pending)

    def remember(self, block: int, key: bytes) -> None:
        """Note that a block, remembered on the GPU, is to be stored, unless its content is known."""
        if self.blocks.num_slots and key not in self.blocks:
            self._pending.setdefault(key, block)

    def announce(self, stored: Stored) -> None:
        """Record the event of one block once host memory has it: now, or when it is stored."""
        (key,) = stored.keys
        if key in self._pending:
            self._stored[key] = stored
        self.blocks.announce(stored)

    def count(self, keys: Iterable[bytes], with_disk: bool = False) -> int:
        """Return how many of a sequence's next blocks are known, up to the first that is not.

        Args:
            with_disk: Whether the disks' content counts, too.
        """
        num_known = 0
        for key in keys:
            if key not in self.blocks and not (with_disk and key in self.disk.blocks):
                break
            num_known += 1
        return num_known

    def is_overwritten(self, allocator: BlockAllocator) -> bool:
        """Return whether the next step may write to a pending block, which has been allocated again."""
        return any(allocator.find([key]) != [block] for key, block in self._pending.items())

    def take_pending(self) -> tuple[list[int], list[int], list[bytes]]:
        """Return all pending blocks that find room, their slots and their keys, and count their content as known."""
        blocks: list[int] = []
        slots: list[int] = []
        keys: list[bytes] = []
        for key, block in self._pending.items():
            if key in self.blocks:  # it has come from the disk meanwhile
                continue
            if (slot := self.blocks.add(key)) is not None:
                if slot in slots:  # more blocks are pending than the tier has slots
                    index = slots.index(slot)
                    del blocks[index], slots[index], keys[index]
                blocks.append(block)
                slots.append(slot)
                keys.append(key)
            if key in self._stored:
                self.blocks.announce(self._stored[key])
        self._pending.clear()
        self._stored.clear()
        return blocks, slots, keys
