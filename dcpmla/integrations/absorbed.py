"""The layout of decodes inside another engine, from its tensors. Short prefills are decodes, too."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dcpmla.attention.backends.calls import Segments
from dcpmla.attention.costs import SEGMENT_ROWS
from dcpmla.attention.step.metadata import DecodeMetadata, StepBuilder, part_tokens
from dcpmla.attention.step.table import cut_queries
from dcpmla.upload import upload

TokenRange = tuple[slice, DecodeMetadata]


@dataclass(frozen=True)
class DecodeLayout:
    """The layout of decodes, drafts and short prefills.

    Requests with equally many new tokens, at most a decode and its drafts, stay whole: CUDA graphs replay such steps,
    so all their tensors stay in place. Other steps cut their requests into segments.

    Attributes:
        steps: Builder with the rank's place in the DCP group.
        num_heads: Heads of a query token in the kernel, from all ranks of the DCP group.
        max_query_len: Most new tokens of a request in a graph.
        workspace: Memory of the decode kernel (`decode_workspace`).
        token_lens: [max_num_seqs * max_query_len] int32, memory for the lengths of requests with several tokens.
    """

    steps: StepBuilder
    num_heads: int
    max_query_len: int
    workspace: Tensor | None
    token_lens: Tensor

    @property
    def segment_len(self) -> int:
        """Return the most tokens of a segment."""
        return max(1, SEGMENT_ROWS // self.num_heads)

    @property
    def part_len(self) -> int:
        """Return the most tokens of a part."""
        return part_tokens(self.num_heads, self.steps.layout.dcp)

    def max_segments(self, max_num_seqs: int, max_num_tokens: int) -> int:
        """Return a bound on the segments of a part, for steps of so many requests and tokens."""
        num_tokens = min(self.part_len, max_num_tokens)
        return min(num_tokens, max_num_seqs + num_tokens // self.segment_len)

    def build(
        self,
        block_table: Tensor,
        seq_lens: Tensor,
        local_seq_lens: Tensor,
        query_start_loc: Tensor,
        query_start: np.ndarray,
        num_tokens: int,
    ) -> tuple[TokenRange, ...]:
        """Lay out a step, without waiting for the device.

        Args:
            block_table: [n, max_blocks] int32.
            seq_lens: [n] int32, tokens of each request after this step; zero for the padding of a graph.
            local_seq_lens: [n] int32, tokens of each request on this rank.
            query_start_loc: [n + 1] int32, start of each request's new tokens.
            query_start: The same numbers on the host. Padding has no new tokens there.
            num_tokens: Query tokens, including a graph's padding.
        Returns:
            Token ranges and their metadata. Each makes one exchange; all ranks have the same ranges.
        """
        query_len = uniform_query_len(query_start, len(block_table), num_tokens)
        if query_len is not None and query_len <= self.max_query_len:
            return self.uniform(block_table, seq_lens, local_seq_lens, query_len)
        segment_lens, request = cut_queries(np.diff(query_start), self.segment_len)
        start = np.concatenate([[0], np.cumsum(segment_lens)]).astype(np.int32)
        index, start_loc = upload([request, start], self.steps.layout.device)
        # One form of cut steps, so that the warm-up compiles few variants of the kernel.
        queries = None if self.segment_len == 1 else Segments(tuple(start.tolist()), start_loc)
        _, seen = tokens_seen(seq_lens, query_start_loc, None, num_tokens)
        token_lens = self._local(seen)
        step = DecodeMetadata(block_table, token_lens, queries, int(segment_lens.max()), self.workspace, index)
        return tuple(step.parts(self.part_len))

    def uniform(
        self, block_table: Tensor, seq_lens: Tensor, local_seq_lens: Tensor, query_len: int
    ) -> tuple[TokenRange, ...]:
        """Lay out requests that have query_len new tokens each, whole; arguments as for `build`."""
        num_tokens = len(block_table) * query_len
        if query_len > 1:
            _, seen = tokens_seen(seq_lens, None, query_len, num_tokens)
            local_seq_lens = self.token_lens[:num_tokens].copy_(self._local(seen))
        step = DecodeMetadata(block_table, local_seq_lens, None, query_len, self.workspace)
        return ((slice(0, num_tokens), step),)

    def single_tokens(self, block_table: Tensor, local_seq_lens: Tensor, num_tokens: int) -> tuple[TokenRange, ...]:
        """Return the parts of a step whose tokens attend to rows of their own: each token is a request by itself.

        Without an exchange there is one part.

        Args:
            block_table, local_seq_lens: Arguments of `build`, which nothing reads.
        """
        step = DecodeMetadata(block_table, local_seq_lens, None, 1, self.workspace)
        part_len = self.part_len if self.steps.layout.dcp.decode_context_parallel_size > 1 else max(1, num_tokens)
        starts = range(0, num_tokens, part_len)
        return tuple((slice(start, min(start + part_len, num_tokens)), step) for start in starts)

    def _local(self, seen: Tensor) -> Tensor:
        """Return this rank's share of the first `seen` tokens, int32; zero for the padding of a graph."""
        return self.steps.layout.owner.local_seq_lens(seen.clamp(min=0))


def uniform_query_len(query_start: np.ndarray, num_reqs: int, num_tokens: int) -> int | None:
    """Return the new tokens of each request if all have equally many, else None.

    Args:
        query_start: Starts of requests' new tokens [n + 1], on the host. Padding of a graph has none there.
        num_reqs, num_tokens: Requests and new tokens, including a graph's padding.
    """
    longest = int(np.diff(query_start).max())
    return longest if longest * num_reqs == num_tokens else None


def tokens_seen(
    seq_lens: Tensor, query_start_loc: Tensor | None, query_len: int | None, num_tokens: int
) -> tuple[Tensor, Tensor]:
    """Return each token's request, and the tokens of that request up to it, [num_tokens] each; not positive for the
    padding of a graph.

    Args:
        seq_lens: [n], tokens of each request after this step.
        query_start_loc: [n + 1], start of each request's new tokens; None with query_len.
        query_len: New tokens of each request, if all have equally many, padding included; else None.
    """
    index = torch.arange(num_tokens, device=seq_lens.device)
    if query_len is not None:
        request = index // query_len
        return request, seq_lens[request] + index % query_len + (1 - query_len)
    assert query_start_loc is not None
    # The host knows only a bound on the lengths of requests whose drafts are not verified yet.
    request = torch.repeat_interleave(query_start_loc.diff(), output_size=num_tokens)
    return request, (seq_lens - query_start_loc[1:])[request] + index + 1
