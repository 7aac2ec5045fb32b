"""Sizes that steps in CUDA graphs are padded to, and their limits; sizes of a warm-up's steps."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from dcpmla.attention.costs import SEGMENT_ROWS
from dcpmla.attention.step.metadata import part_tokens
from dcpmla.config import DCPConfig

MAX_WHOLE_TOKENS = 1024  # tokens of the largest step that is one graph; the host keeps up with larger ones
MAX_TOKENS = 8192  # tokens of the largest step in graphs; the GPU takes longer for a larger one than the host
DECODE_TOKENS = 256  # first tokens of a step with MHA that may be decodes inside graphs
# Tokens of a whole graph for each request that may attend by MHA, and the fewest such requests. MHA's kernel has
# programs for all such requests, even in a step with fewer.
_PROMPT_TOKENS, _FEWEST_PROMPTS = 16, 8


class GraphSize(NamedTuple):
    """A size that steps are padded to.

    Attributes:
        num_tokens: Number of tokens.
        is_whole: Whether the step is one graph, attention included.
        query_len: Tokens of each request, all of which attend with absorbed queries; 0 for requests of any lengths.
    """

    num_tokens: int
    is_whole: bool = True
    query_len: int = 0

    @classmethod
    def of_requests(cls, num_reqs: int, query_len: int = 1) -> "GraphSize":
        """Return the size of decodes of query_len tokens each."""
        return cls(num_reqs * query_len, True, query_len)

    def __str__(self) -> str:
        if not self.query_len:
            return f"{self.num_tokens} tokens{', whole' if self.is_whole else ''}"
        of_tokens = f" of {self.query_len} tokens" if self.query_len > 1 else ""
        return f"{self.num_tokens // self.query_len} requests{of_tokens}"


class GraphLimits(NamedTuple):
    """Limits of steps in graphs.

    Attributes:
        max_num_seqs: Maximum requests of a step.
        max_model_len: Tokens of the longest request.
        segment_len: Maximum tokens of a segment, to which absorbed attention cuts requests of different lengths.
        num_absorbed_tokens: Maximum tokens of a whole graph that attend with absorbed queries.
        num_static_decodes: Maximum first tokens of other graphs whose absorbed attention is in the graphs.
        has_prompts: Whether tokens of a whole graph may attend by MHA.
    """

    max_num_seqs: int
    max_model_len: int
    segment_len: int = 1
    num_absorbed_tokens: int = 0
    num_static_decodes: int = 0
    has_prompts: bool = False

    @property
    def num_segments(self) -> int:
        """Return the most segments of a step, padding among them."""
        return self.max_num_seqs + self.num_absorbed_tokens // self.segment_len + 1

    def room(self, size: GraphSize) -> int:
        """Return the number of a size's first tokens whose absorbed attention its graphs compute."""
        if size.query_len:
            return size.num_tokens
        return min(self.num_absorbed_tokens if size.is_whole else self.num_static_decodes, size.num_tokens)


def decode_sizes(max_num_seqs: int, query_len: int = 1) -> list[GraphSize]:
    """Return the sizes of decodes, ascending, the last one of max_num_seqs requests; none if that is 0.

    Source: vLLM's cudagraph_capture_sizes.
    """
    sizes = (1, 2, 4, *range(8, 256, 8), *range(256, max_num_seqs, 16))
    return [GraphSize.of_requests(size, query_len) for size in _up_to(max_num_seqs, sizes)]


def find_size(sizes: Sequence[GraphSize], num_tokens: int) -> GraphSize | None:
    """Return the least of ascending sizes that holds so many tokens; None if there is none."""
    index = bisect_left(sizes, num_tokens, key=lambda size: size.num_tokens)
    return sizes[index] if index < len(sizes) else None


def token_sizes(max_num_tokens: int, tokens_per_request: int, dcp: DCPConfig) -> dict[bool, list[int]]:
    """Return the numbers of tokens, ascending, of steps of one graph (True), and of other steps (`mixed_sizes`).

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
    largest = min(max_num_tokens, MAX_WHOLE_TOKENS, most_whole)
    return {True: _up_to(largest, whole), False: mixed_sizes(min(max_num_tokens, MAX_TOKENS))}


def mixed_sizes(max_num_tokens: int) -> list[int]:
    """Return the numbers of tokens, ascending, of steps with prompts. From 128 tokens on at most a third is padding."""
    fine = *range(128, 512, 128), *range(512, 2048, 256), *range(2048, 4096, 512)
    return _up_to(max_num_tokens, [64, *fine, *range(4096, max_num_tokens, 1024)])


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


def warm_up_sizes(largest: int) -> list[int]:
    """Return the powers of two up to a size, the numbers half-way between them, and that size."""
    return _up_to(largest, [1, *(factor << exponent for exponent in range(largest.bit_length()) for factor in (2, 3))])


def _up_to(largest: int, sizes: Sequence[int]) -> list[int]:
    return [*(size for size in sizes if size < largest), largest] if largest else []
