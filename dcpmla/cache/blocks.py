"""Bookkeeping of blocks: which are free, shared or remembered.

Every rank of a DCP group makes the same calls, so block ids are the same on all of them.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from dcpmla.cache.states import StatePool

# What a full block holds: the content before it (a number given to each remembered content, 0 for none), and its own
# tokens. Tokens are compared, not hashes of them: a hit is never wrong.
_Prefix = tuple[int, bytes]


class BlockAllocator:
    """A pool of block ids in [0, num_blocks), which finds full blocks again by the tokens from the first one to theirs.

    A block counts its holders. One that nobody holds is free; while it is not handed out again, what it holds can
    still be found. Blocks are handed out empty ones first, then the least recently held.

    Args:
        block_tokens: tokens that a block id covers, over all DCP ranks.
        num_states: of requests whose caches hold more than blocks (`states`); 0 for others.
    """

    def __init__(self, num_blocks: int, block_tokens: int, num_states: int = 0) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; it must be at least 1")
        if block_tokens < 1:
            raise ValueError(f"block_tokens is {block_tokens}; it must be at least 1")
        self.num_blocks, self.block_tokens = num_blocks, block_tokens
        self.states = StatePool(num_states)
        self._free = OrderedDict.fromkeys(range(num_blocks))  # in the order in which they are handed out
        self._num_holders = [0] * num_blocks
        self._by_prefix: dict[_Prefix, int] = {}
        self._prefix: dict[int, _Prefix] = {}
        self._content: dict[int, int] = {}  # block -> the number of its content; equal blocks have the same
        self.num_remembered = 0  # contents ever

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take free blocks, or none if there are too few; what they held is forgotten.

        Raises:
            ValueError: a negative number, or more than are free; the message says when that can never change.
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
        """Hold blocks that `find` gave, together with their other holders if any."""
        for block in blocks:
            self._free.pop(block, None)
            self._num_holders[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Let go of a sequence's blocks, given in its order.

        Raises:
            ValueError: a block that nobody holds, or one given twice.
        """
        wrong = [block for block in blocks if not 0 <= block < self.num_blocks or not self._num_holders[block]]
        if wrong or len(set(blocks)) != len(blocks):
            raise ValueError(f"blocks {wrong or blocks} are not allocated, or given twice")
        # The last ones first: a block is of no use to a search that does not find those before it.
        for block in reversed(blocks):
            self._num_holders[block] -= 1
            if not self._num_holders[block]:
                self._free[block] = None
                if block not in self._prefix:
                    self._forget(block)
                    self._free.move_to_end(block, last=False)

    def remember(self, block: int, previous: int | None, token_ids: Sequence[int]) -> None:
        """Let a full block that somebody holds be found.

        Args:
            previous: the block before it in its sequence, remembered already; None for the first.
            token_ids: [block_tokens] whose latents it holds.
        """
        prefix = (0 if previous is None else self._content[previous], array("q", token_ids).tobytes())
        known = self._by_prefix.setdefault(prefix, block)
        if known == block:
            self.num_remembered += 1
            self._prefix[block], self._content[block] = prefix, self.num_remembered
        else:  # computed twice at the same time: the first one is found, and what follows either of them is the same
            self._content[block] = self._content[known]

    def find(self, token_ids: Sequence[int]) -> list[int]:
        """Return the blocks that hold the first tokens of a sequence, as many as are remembered."""
        blocks: list[int] = []
        content = 0
        for end in range(self.block_tokens, len(token_ids) + 1, self.block_tokens):
            block = self._by_prefix.get((content, array("q", token_ids[end - self.block_tokens : end]).tobytes()))
            if block is None:
                break
            blocks.append(block)
            content = self._content[block]
        return blocks

    def remember_state(self, block: int) -> int | None:
        """Return where to copy the state after a remembered block; None if it is there already, or nothing is free."""
        return self.states.remember(self._content[block])

    def find_with_state(self, token_ids: Sequence[int]) -> tuple[list[int], int | None]:
        """Return the blocks that `find` gives, up to the last one whose state is remembered, and that state."""
        blocks = self.find(token_ids)
        while blocks:
            state = self.states.find(self._content[blocks[-1]])
            if state is not None:
                return blocks, state
            blocks.pop()
        return [], None

    def _forget(self, block: int) -> None:
        content = self._content.pop(block, None)
        prefix = self._prefix.pop(block, None)
        if prefix is not None:
            del self._by_prefix[prefix]
            assert content is not None
            self.states.forget(content)
