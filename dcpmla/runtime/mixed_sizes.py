"""Sizes that steps with pieces of prompts are padded to, and their limits."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dcpmla.attention.routes import SEGMENT_ROWS
from dcpmla.attention.step import part_tokens
from dcpmla.config import DCPConfig

MAX_WHOLE_TOKENS = 1024  # tokens of the largest step that is one graph; the host keeps up with larger ones
MAX_TOKENS = 8192  # tokens of the largest step in graphs; the GPU takes longer for a larger one than the host
DECODE_TOKENS = 256  # first tokens of a step with MHA that may be decodes inside graphs
# Tokens of a whole graph for each request that may attend by MHA, and the fewest such requests. MHA's kernel has
# programs for all such requests, even in a step with fewer.
_PROMPT_TOKENS, _FEWEST_PROMPTS = 16, 8


class MixedSize(NamedTuple):
    """A size that steps are padded to.

    Attributes:
        num_tokens: Number of tokens.
        is_whole: Whether the step is one graph, attention included.
    """

    num_tokens: int
    is_whole: bool

    def __str__(self) -> str:
        return f"{self.num_tokens} tokens{', whole' if self.is_whole else ''}"


class MixedLimits(NamedTuple):
    """Limits of mixed steps in graphs.

    Attributes:
        num_tokens: Most tokens of a step.
        num_absorbed_tokens: Most tokens of a whole graph that attend with absorbed queries; 0 for no such graph.
        num_reqs: Most requests of a step.
        num_blocks: Most blocks of a request.
        max_model_len: Tokens of the longest request.
        tokens_per_request: Width of the segments that absorbed attention cuts requests into.
        has_prompts: Whether tokens of a whole graph may attend by MHA.
    """

    num_tokens: int
    num_absorbed_tokens: int
    num_reqs: int
    num_blocks: int
    max_model_len: int
    tokens_per_request: int
    has_prompts: bool = False

    @property
    def num_segments(self) -> int:
        """Return the most segments of a step, padding among them."""
        return self.num_reqs + self.num_absorbed_tokens // self.tokens_per_request + 1


def find_size(sizes: Mapping[bool, Sequence[int]], num_tokens: int, is_whole: bool) -> MixedSize | None:
    """Return the size that a step is padded to; None if it is too large.

    Args:
        sizes: Numbers of tokens of all sizes (`token_sizes`).
    """
    tokens = sizes[is_whole]
    index = bisect_left(tokens, num_tokens)
    return MixedSize(tokens[index], is_whole) if index < len(tokens) else None


def token_sizes(max_num_tokens: int, tokens_per_request: int, dcp: DCPConfig) -> dict[bool, list[int]]:
    """Return the numbers of tokens, ascending, of steps of one graph (True), and of other steps.

    Other steps have at most a third of padding from 128 tokens on.

    Args:
        max_num_tokens: Limit of a step's tokens.
        tokens_per_request: Width of the pieces that absorbed attention cuts requests into; 0 where pieces of prompts
            are not absorbed.
        dcp: Layout of the cache.
    """
    # In a fixed order tokens of prompts attend by MHA, and need no room among absorbed ones.
    room = most_absorbed(tokens_per_request, dcp)
    most_whole = MAX_WHOLE_TOKENS if dcp.deterministic and room else room
    whole = [16, *range(32, 256, 32), *range(256, 512, 64), *range(512, 1024, 128)]
    mixed = [64, *range(128, 512, 128), *range(512, 2048, 256), *range(2048, 4096, 512), *range(4096, 8192, 1024)]
    largest = min(max_num_tokens, MAX_WHOLE_TOKENS, most_whole)
    return {True: _up_to(largest, whole), False: _up_to(min(max_num_tokens, MAX_TOKENS), mixed)}


def most_absorbed(tokens_per_request: int, dcp: DCPConfig) -> int:
    """Return how many tokens of a graph may attend with absorbed queries.

    Args:
        tokens_per_request, dcp: As in `token_sizes`.
    """
    if not tokens_per_request:
        return 0
    # The host does not know the segments of a captured step, so it cannot cut the step into parts. As many heads as fit
    # into a segment's rows are no fewer than the DCP group's.
    limit = part_tokens(SEGMENT_ROWS // tokens_per_request, dcp)
    # In a fixed order prompts attend by MHA, so only tokens of answers need this room, and all of it takes time.
    return min(limit, DECODE_TOKENS) if dcp.deterministic else limit


def max_prompts(num_tokens: int) -> int:
    """Return the most requests that attend by MHA in a whole graph of a number of tokens."""
    return max(_FEWEST_PROMPTS, num_tokens // _PROMPT_TOKENS)


def _up_to(largest: int, sizes: Sequence[int]) -> list[int]:
    return [*(size for size in sizes if size < largest), largest] if largest else []
