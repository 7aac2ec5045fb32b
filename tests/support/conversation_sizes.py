"""Sizes of the conversations of an engine, which make it show its features whatever the tokens of its blocks."""

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from tests.support.combinations import Row

NUM_DRAFTS = 3  # of a request in a step, with drafts
NEW_OF_TURNS = 8  # new tokens of second turns
MORE_OF_TURNS = (3, 24, 25, 26)  # tokens that second turns add to the first ones
_LAG = 12  # steps within which three prompts begin, 24 tokens each step
_EARLY = (16, 8, 0, 24)  # new tokens that each may have by then; the last one, of one token, begins first


class ConversationSizes(NamedTuple):
    """Sizes of conversations of two turns.

    Attributes:
        prompts: Tokens of each prompt; the last one, of one token, passes the others.
        num_new: New tokens of each first turn.
        num_blocks: Blocks of the cache.
    """

    prompts: tuple[int, ...]
    num_new: int
    num_blocks: int


def conversation_sizes(row: Row, block_tokens: int) -> ConversationSizes:
    """Return sizes with which requests are preempted in first turns if the row asks for that, and only then; and the
    first conversation's second turn begins with a full block of its prompt, for the same turn again.

    In deterministic mode first prompts are shorter than a block.
    """
    if row.has("preemption"):
        return _scarce(_scarce_prompts(block_tokens), block_tokens, has_drafts=not row.has("no drafts"))
    prompts = (58, 63, 60, 1)
    num_new = 10 if row.has("no drafts") else 36  # Tokens repeat, so that drafts begin and are accepted.
    if row.has("deterministic"):
        prompts = (block_tokens - 12, block_tokens - 11, block_tokens - 13, 1)
    num_blocks = sum(_num_blocks(each, block_tokens) for each in _lengths(prompts, num_new))
    return ConversationSizes(prompts, num_new, num_blocks)


def _scarce_prompts(block_tokens: int) -> tuple[int, ...]:
    if block_tokens < 64:
        return 28, 33, 30, 1
    return block_tokens - 20, block_tokens - 17, block_tokens - 18, 1  # Few new tokens need another block.


def _scarce(prompts: tuple[int, ...], block_tokens: int, has_drafts: bool) -> ConversationSizes:
    """Return a room in which all requests begin, and new tokens for which it is too small before one of them ends.

    They are admitted if a block is left for each one that runs. With drafts one request may be as many times as fast as
    another as a step has tokens of it.
    """
    begun = [each + early for each, early in zip(prompts, _EARLY, strict=True)]
    num_blocks = sum(_num_blocks(each, block_tokens) for each in begun) + 3
    slowness = 1 + NUM_DRAFTS if has_drafts else 1

    def least_blocks(num_new: int, ending: int) -> int:
        """Return the blocks of all, without preemption, when one ends."""
        others = [each + max(0, num_new // slowness - _LAG) for each in prompts]
        others[ending] = prompts[ending] + num_new - 1
        return sum(_num_blocks(each, block_tokens) for each in others)

    enough = (new for new in count(16, 4) if all(least_blocks(new, ending) > num_blocks for ending in range(4)))
    return ConversationSizes(prompts, next(enough), num_blocks)


def _num_blocks(num_tokens: int, block_tokens: int) -> int:
    return -(-num_tokens // block_tokens)


def _lengths(prompts: Sequence[int], num_new: int) -> list[int]:
    """Return the tokens of each conversation at its end."""
    return [each + num_new + more + NEW_OF_TURNS for each, more in zip(prompts, MORE_OF_TURNS, strict=True)]
