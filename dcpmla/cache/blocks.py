"""Bookkeeping of free, shared and remembered blocks.

Every rank of a DCP group makes the same calls, so all ranks have the same block ids.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b, sha256
from typing import Self

from dcpmla.cache.block_events import BlockEvent, Cleared, Removed
from dcpmla.cache.plan import CachePlan
from dcpmla.cache.states import StatePool, Worth


def block_key(previous: bytes, token_ids: Sequence[int], num_given: int | None = None) -> bytes:
    """Return the key of a full block, a digest of all tokens from the first one to its last.

    Keys are compared in place of tokens, so they are SHA-256: no two texts with the same digest are known, and every
    rank computes the same one. Python's hashes have neither property.

    Args:
        previous: The key of the block before it; for the first block `salt_key`.
        token_ids: The block's tokens [block_tokens].
        num_given: Number of its first tokens that were given, where cached rows of generated tokens differ from those
            of the same tokens in a prompt (`DCPConfig.deterministic`): its key then differs, too. None for all.
    """
    form = b"" if num_given is None else num_given.to_bytes(8, "little")
    return sha256(previous + array("q", token_ids).tobytes() + form).digest()


def salt_key(cache_salt: str) -> bytes:
    """Return the key before a sequence's first block: sequences with different salts never have a key in common.

    It is a different hash from `block_key`, so that no salt produces the key of a block.
    """
    return blake2b(cache_salt.encode(errors="surrogatepass"), digest_size=32).digest() if cache_salt else b""


class BlockAllocator:
    """A pool of block ids in [0, num_blocks), in which full blocks are found again by their keys (`block_key`).

    A block without holders is free. It can be found until it is allocated again. Empty blocks are allocated first,
    then the least recently held.

    Args:
        block_tokens: Tokens that a block id covers, over all DCP ranks.
        num_states: Size of the pool of states, 0 for caches that consist of blocks only.
    Attributes:
        events: Changes of the remembered blocks since `take_events`; None, the default, keeps no record of them.
    """

    def __init__(self, num_blocks: int, block_tokens: int, num_states: int = 0) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; it must be at least 1")
        if block_tokens < 1:
            raise ValueError(f"block_tokens is {block_tokens}; it must be at least 1")
        self.num_blocks, self.block_tokens, self._num_states = num_blocks, block_tokens, num_states
        self.events: list[BlockEvent] | None = None
        self.reset()

    @classmethod
    def of(cls, plan: CachePlan) -> Self:
        """Return the allocator of a cache's blocks and states."""
        return cls(plan.num_blocks, plan.block_tokens, plan.num_states)

    def reset(self) -> None:
        """Reset all blocks and states, even if in use."""
        num_blocks = self.num_blocks
        self.states = StatePool(self._num_states)
        self._free = OrderedDict.fromkeys(range(num_blocks))  # in the order of allocation
        self._num_holders = [0] * num_blocks
        self._by_key: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}  # the inverse of _by_key
        self.num_remembered = 0  # a counter that never decreases
        if self.events is not None:
            self.events.append(Cleared())

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take free blocks, all or none, and forget their content.

        Raises:
            ValueError: The number is negative or exceeds the free blocks.
        """
        if num_blocks < 0:
            raise ValueError(f"num_blocks is {num_blocks}; it must not be negative")
        if num_blocks > self.num_blocks:
            raise ValueError(
                f"num_blocks is {num_blocks}, but the whole cache has {self.num_blocks}: this can never fit"
            )
        if num_blocks > self.num_free:
            raise ValueError(
                f"num_blocks is {num_blocks}, but only {self.num_free} of {self.num_blocks} blocks are free"
            )
        blocks = [self._free.popitem(last=False)[0] for _ in range(num_blocks)]
        for block in blocks:
            self._forget(block)
            self._num_holders[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Add a holder to blocks that `find` returned."""
        for block in blocks:
            if not self._num_holders[block]:
                del self._free[block]
            self._num_holders[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Remove a holder of a sequence's blocks, which are in the order of its tokens.

        Raises:
            ValueError: A block has no holder, or appears twice.
        """
        wrong = [block for block in blocks if not 0 <= block < self.num_blocks or not self._num_holders[block]]
        if wrong or len(set(blocks)) != len(blocks):
            raise ValueError(f"blocks {wrong or blocks} are not allocated, or given twice")
        # The end of a sequence is allocated before its beginning, because no search finds it alone.
        for block in reversed(blocks):
            self._num_holders[block] -= 1
            if not self._num_holders[block]:
                self._free[block] = None
                if block not in self._keys:
                    self._free.move_to_end(block, last=False)

    def remember(self, block: int, key: bytes) -> bool:
        """Register a full block with a holder under its key; return False if another block has the key already."""
        if key in self._by_key:
            return False
        self._by_key[key], self._keys[block] = block, key
        self.num_remembered += 1
        return True

    def __contains__(self, key: bytes) -> bool:
        return key in self._by_key

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Return the remembered blocks of a sequence, up to the first key without one."""
        blocks: list[int] = []
        for block in map(self._by_key.get, keys):
            if block is None:
                break
            blocks.append(block)
        return blocks

    def remember_state(self, key: bytes, worth: Worth) -> int | None:
        """Return a state for a copy of the state after a remembered block, or None if no copy is needed or possible."""
        block = self._by_key.get(key)
        return None if block is None else self.states.remember(block, worth)

    def supersede_state(self, key: bytes) -> None:
        """Lower the worth of the state after a block, if one is remembered (`StatePool.supersede`)."""
        block = self._by_key.get(key)
        if block is not None:
            self.states.supersede(block)

    def has_state(self, key: bytes) -> bool:
        """Return whether a state after a block is remembered."""
        return self._by_key.get(key, -1) in self.states

    def with_state(self, blocks: Sequence[int]) -> tuple[list[int], int | None]:
        """Return the blocks of `find` up to the last one with a remembered state, and that state."""
        for end in range(len(blocks), 0, -1):
            if (state := self.states.find(blocks[end - 1])) is not None:
                return list(blocks[:end]), state
        return [], None

    def take_events(self) -> list[BlockEvent]:
        """Return the changes of the remembered blocks since the last call, the oldest first, and keep later ones."""
        events, self.events = self.events or [], []
        return events

    def _forget(self, block: int) -> None:
        key = self._keys.pop(block, None)
        if key is not None:
            del self._by_key[key]
            if self.events is not None:
                self.events.append(Removed(key))
            if self._num_states:
                self.states.forget(block)
