"""The layout of decodes inside another engine, from its tensors. Short prefills are decodes, too."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dcpmla.attention.backends.calls import Segments
from dcpmla.attention.costs import SEGMENT_ROWS
from dcpmla.attention.step.metadata import DecodeMetadata, StepBuilder, lay_out, part_tokens
from dcpmla.attention.step.table import StepTable, StepTokens, cut_queries
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
        tokens: Memory for the tokens of whole requests; None to lay out each step in memory of its own.
    """

    steps: StepBuilder
    num_heads: int
    max_query_len: int
    workspace: Tensor | None
    tokens: StepTokens | None = None

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
        query_start_loc: Tensor,
        query_start: np.ndarray,
        num_tokens: int,
    ) -> tuple[TokenRange, ...]:
        """Lay out a step, without waiting for the device.

        Args:
            block_table: [n, max_blocks] int32.
            seq_lens: [n] int32, tokens of each request after this step; zero for the padding of a graph.
            query_start_loc: [n + 1] int32, start of each request's new tokens.
            query_start: The same numbers on the host. Padding has no new tokens there.
            num_tokens: Query tokens, including a graph's padding.
        Returns:
            Token ranges and their metadata. Each makes one exchange; all ranks have the same ranges.
        """
        query_len = uniform_query_len(query_start, len(block_table), num_tokens)
        if query_len is not None and query_len <= self.max_query_len:
            return self.uniform(block_table, seq_lens, query_len)
        device = self.steps.layout.device
        segment_lens, request = cut_queries(np.diff(query_start), self.segment_len)
        start = np.concatenate([[0], np.cumsum(segment_lens)]).astype(np.int32)
        index, start_loc = upload([request, start], device)
        # One form of cut steps, so that the warm-up compiles few variants of the kernel.
        queries = None if self.segment_len == 1 else Segments(tuple(start.tolist()), start_loc)
        tokens = StepTokens.empty(num_tokens, device)
        lay_out(table_of_lengths(seq_lens, query_start_loc, block_table), tokens, self.steps.layout)
        longest = int(segment_lens.max())
        step = DecodeMetadata(block_table, tokens.local_seq_lens, queries, longest, self.workspace, index)
        return tuple(step.parts(self.part_len))

    def uniform(self, block_table: Tensor, seq_lens: Tensor, query_len: int) -> tuple[TokenRange, ...]:
        """Lay out requests that have query_len new tokens each, whole; arguments as for `build`."""
        num_tokens, layout = len(block_table) * query_len, self.steps.layout
        starts = torch.arange(0, num_tokens + 1, query_len, dtype=torch.int32, device=layout.device)
        tokens = StepTokens.empty(num_tokens, layout.device) if self.tokens is None else self.tokens.front(num_tokens)
        lay_out(table_of_lengths(seq_lens, starts, block_table), tokens, layout)
        return self.whole(block_table, tokens.local_seq_lens, query_len)

    def whole(self, block_table: Tensor, local_seq_lens: Tensor, query_len: int) -> tuple[TokenRange, ...]:
        """Return the one part of a step whose requests have query_len new tokens each.

        Args:
            local_seq_lens: [n * query_len] int32, tokens on this rank that each new token sees.
        """
        step = DecodeMetadata(block_table, local_seq_lens, None, query_len, self.workspace)
        return ((slice(0, len(local_seq_lens)), step),)

    def single_tokens(self, block_table: Tensor, local_seq_lens: Tensor, num_tokens: int) -> tuple[TokenRange, ...]:
        """Return the parts of a step whose tokens attend to rows of their own: each token is a request by itself.

        Without an exchange there is one part.

        Args:
            block_table, local_seq_lens: Arguments of `whole`, which nothing reads.
        """
        step = DecodeMetadata(block_table, local_seq_lens, None, 1, self.workspace)
        part_len = self.part_len if self.steps.layout.dcp.decode_context_parallel_size > 1 else max(1, num_tokens)
        starts = range(0, num_tokens, part_len)
        return tuple((slice(start, min(start + part_len, num_tokens)), step) for start in starts)


def uniform_query_len(query_start: np.ndarray, num_reqs: int, num_tokens: int) -> int | None:
    """Return the new tokens of each request if all have equally many, else None.

    Args:
        query_start: Starts of requests' new tokens [n + 1], on the host. Padding of a graph has none there.
        num_reqs, num_tokens: Requests and new tokens, including a graph's padding.
    """
    longest = int(np.diff(query_start).max())
    return longest if longest * num_reqs == num_tokens else None


def table_of_lengths(seq_lens: Tensor, row_start: Tensor, block_table: Tensor) -> StepTable:
    """Return the table of a step whose lengths are on the device alone: the host knows only a bound on the lengths of
    requests whose drafts are not verified yet. It has no states, prefills or segments.

    Args:
        seq_lens: Tokens of each request after the step [n], int32; 0 for padding.
        row_start: First row of each request, and the end [n + 1], int32. Rows after its tokens repeat the last one.
        block_table: Block ids of each request [n, max_blocks], int32.
    """
    num_tokens, none = row_start.diff().minimum(seq_lens), torch.zeros_like(seq_lens)
    table = StepTable._make((none,) * len(StepTable._fields))
    return table._replace(
        first_position=seq_lens - num_tokens,
        num_tokens=num_tokens,
        begin=torch.empty_like(none),
        end=torch.empty_like(none),
        row_start=row_start,
        num_attending=row_start[-1:].clone(),  # a part of row_start may begin between multiples of 16 bytes
        pieces=none[:0],
        block_table=block_table,
    )
