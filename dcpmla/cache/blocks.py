"""Which blocks are free. Every rank of a DCP group makes the same calls, so block ids are the same on all of them."""


class BlockAllocator:
    """Hands out block ids in [0, num_blocks)."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; it must be at least 1")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._allocated: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks off the free list, all or none.

        Raises:
            ValueError: a negative number, or more than are free; the message says when that can never change.
        """
        if num_blocks < 0:
            raise ValueError(f"num_blocks is {num_blocks}; it must not be negative")
        if num_blocks > self.num_blocks:
            raise ValueError(f"num_blocks is {num_blocks}, but the whole cache has {self.num_blocks}: this can never fit")
        if num_blocks > self.num_free:
            raise ValueError(f"num_blocks is {num_blocks}, but only {self.num_free} of {self.num_blocks} blocks are free")
        blocks = [self._free.pop() for _ in range(num_blocks)]
        self._allocated.update(blocks)
        return blocks

    def free(self, blocks: list[int]) -> None:
        """Give blocks back.

        Raises:
            ValueError: a block that is not out (given back twice, or never handed out).
        """
        wrong = [block for block in blocks if block not in self._allocated]
        if wrong or len(set(blocks)) != len(blocks):
            raise ValueError(f"blocks {wrong or blocks} are not allocated, or given twice")
        self._allocated.difference_update(blocks)
        self._free.extend(reversed(blocks))
