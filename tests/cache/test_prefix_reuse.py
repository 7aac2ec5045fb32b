"""Blocks found again by their keys: always the right ones, never one that is being written, the least recently held
forgotten first.
"""

from collections.abc import Sequence

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dcpmla.cache.blocks import BlockAllocator, block_key

BLOCK = 2


def keys(tokens: Sequence[int]) -> list[bytes]:
    """Return the keys of a sequence's full blocks."""
    chain = [b""]
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        chain.append(block_key(chain[-1], tokens[start : start + BLOCK]))
    return chain[1:]


class Blocks(RuleBasedStateMachine):
    """Random sequences of two tokens are admitted and freed; a plain dict has the content of every block.

    A new block is in no other sequence, a refused call changes nothing, and another rank gets the same blocks.
    """

    @initialize(size=st.integers(1, 8))
    def start(self, size: int) -> None:
        self.size, self.allocator, self.other_rank = size, BlockAllocator(size, BLOCK), BlockAllocator(size, BLOCK)
        self.content: dict[int, Sequence[int]] = {}  # block -> all tokens up to its end
        self.held: list[list[int]] = []

    @property
    def out(self) -> set[int]:
        return {block for held in self.held for block in held}

    @rule(tokens=st.lists(st.integers(0, 1), max_size=9))
    def admit(self, tokens: list[int]) -> None:
        found = self.allocator.find(keys(tokens))
        assert found == self.other_rank.find(keys(tokens))
        assert [self.content[block] for block in found] == [
            tokens[: (index + 1) * BLOCK] for index in range(len(found))
        ]
        for allocator in (self.allocator, self.other_rank):
            allocator.share(found)
        num_new, num_free = -(-len(tokens) // BLOCK) - len(found), self.allocator.num_free
        if num_new > num_free:
            message = "never fit" if num_new > self.size else f"only {num_free} of {self.size} blocks are free"
            with pytest.raises(ValueError, match=message):
                self.allocator.allocate(num_new)
            self.free(found)
            return
        new = self.allocator.allocate(num_new)
        assert new == self.other_rank.allocate(num_new)
        blocks = found + new
        assert len(set(blocks)) == len(blocks)
        assert set(new) <= set(range(self.size)) - self.out
        self.content |= dict.fromkeys(new, ())
        for index in range(len(found), len(tokens) // BLOCK):
            self.content[blocks[index]] = tokens[: (index + 1) * BLOCK]
            for allocator in (self.allocator, self.other_rank):
                allocator.remember(blocks[index], keys(tokens)[index])
        assert len(self.allocator.find(keys(tokens))) == len(tokens) // BLOCK
        self.held.append(blocks)

    @rule(data=st.data(), is_whole=st.booleans())
    def leave(self, data: st.DataObject, is_whole: bool) -> None:
        if any(self.held):
            blocks = data.draw(st.sampled_from([blocks for blocks in self.held if blocks]))
            self.free([blocks.pop() for _ in range(len(blocks) if is_whole else 1)][::-1])

    def free(self, blocks: list[int]) -> None:
        for allocator in (self.allocator, self.other_rank):
            allocator.free(blocks)

    @rule(block=st.integers(-2, 9), data=st.data())
    def free_what_is_not_out(self, block: int, data: st.DataObject) -> None:
        """Together with blocks that are out: all or none."""
        with_it = data.draw(st.sampled_from([*self.held, []]))
        if block in self.out:
            with pytest.raises(ValueError, match="given twice"):
                self.allocator.free([block, block])
        else:
            with pytest.raises(ValueError, match=rf"\[{block}\] are not allocated"):
                self.allocator.free([*with_it, block])

    @invariant()
    def counts_add_up(self) -> None:
        if hasattr(self, "allocator"):
            assert self.allocator.num_free == self.size - len(self.out)


TestBlocks = Blocks.TestCase


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 4), "num_blocks is 0; it must be at least 1"),
        ((-3, 4), "num_blocks is -3; it must be at least 1"),
        ((4, 0), "block_tokens is 0; it must be at least 1"),
    ],
)
def test_allocators_of_nothing(sizes: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        BlockAllocator(*sizes)


def hold(allocator: BlockAllocator, tokens: list[int]) -> list[int]:
    """Blocks of a new sequence of full blocks, remembered."""
    blocks = allocator.allocate(len(tokens) // BLOCK)
    for block, key in zip(blocks, keys(tokens), strict=True):
        allocator.remember(block, key)
    return blocks


def find(allocator: BlockAllocator, tokens: list[int]) -> list[int]:
    return allocator.find(keys(tokens))


def test_the_least_recently_held_goes_first_and_the_end_before_the_beginning() -> None:
    allocator = BlockAllocator(6, BLOCK)
    first, second = hold(allocator, [1, 1, 1, 2]), hold(allocator, [2, 1, 2, 2])
    allocator.free(first)
    allocator.free(second)
    assert allocator.allocate(2) == [4, 5]  # empty ones before any that may be of use
    assert find(allocator, [1, 1, 1, 2]) == first
    allocator.allocate(1)
    assert find(allocator, [1, 1, 1, 2]) == first[:1]
    allocator.share(second)
    allocator.free(second)
    allocator.allocate(1)
    assert find(allocator, [1, 1, 1, 2]) == []
    assert find(allocator, [2, 1, 2, 2, 9]) == second


def test_blocks_that_hold_nothing_to_be_found_go_first() -> None:
    allocator = BlockAllocator(6, BLOCK)
    known, unknown = hold(allocator, [1, 2, 3, 4]), allocator.allocate(1)
    twin = hold(allocator, [1, 2])  # found in the first one's place
    allocator.free(known)
    allocator.free([*twin, *unknown])  # used last of all
    assert {*allocator.allocate(4)} == {4, 5, *twin, *unknown}
    assert find(allocator, [1, 2, 3, 4]) == known


def test_two_that_computed_the_same_share_what_follows() -> None:
    allocator = BlockAllocator(8, BLOCK)
    first, twin = hold(allocator, [1, 2]), hold(allocator, [1, 2])
    (after,) = allocator.allocate(1)
    allocator.remember(after, keys([1, 2, 3, 4])[1])
    assert find(allocator, [1, 2, 3, 4]) == [*first, after]
    allocator.free([*twin, after])
    assert find(allocator, [1, 2, 3, 4]) == [*first, after]


def test_a_search_ends_at_the_first_gap() -> None:
    """Of two requests with the same tokens one may have registered what another's lost blocks preceded."""
    allocator = BlockAllocator(3, 1)
    blocks = allocator.allocate(2)
    for block, key in zip(blocks, (b"first", b"third"), strict=True):
        allocator.remember(block, key)
    assert allocator.find([b"first", b"second", b"third"]) == blocks[:1]
    assert allocator.find([b"second", b"third"]) == []


def test_tokens_of_a_large_vocabulary() -> None:
    allocator = BlockAllocator(4, BLOCK)
    blocks = hold(allocator, [163_000, 1 << 40])
    assert find(allocator, [163_000, 1 << 40]) == blocks
    assert find(allocator, [163_000, 1]) == []
    assert find(allocator, [163_000 - (1 << 16), 1 << 40]) == []
    assert find(allocator, [163_000, 1 << 41]) == []
