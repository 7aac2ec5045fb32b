"""The layout of decodes inside another engine, from its tensors. Short prefills are decodes, too."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dcpmla import ownership
from dcpmla.attention.build import StepBuilder
from dcpmla.attention.calls import Segments
from dcpmla.attention.chunks import cut_queries
from dcpmla.attention.step import PART_ROWS, SEGMENT_ROWS, DecodeMetadata
from dcpmla.upload import upload

Part = tuple[slice, DecodeMetadata]


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
        return max(1, PART_ROWS // self.num_heads)

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
    ) -> tuple[Part, ...]:
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
        query_lens = np.diff(query_start)
        longest = int(query_lens.max())
        if longest <= self.max_query_len and longest * len(block_table) == num_tokens:
            return self.uniform(block_table, seq_lens, local_seq_lens, longest)
        segment_lens, request = cut_queries(query_lens, self.segment_len)
        start = np.concatenate([[0], np.cumsum(segment_lens)]).astype(np.int32)
        index, start_loc = upload([request, start], self.steps.device)
        # One form of cut steps, so that the warm-up compiles few variants of the kernel.
        queries = None if self.segment_len == 1 else Segments(tuple(start.tolist()), start_loc)
        token_lens = self._ragged_lens(seq_lens, query_start_loc, num_tokens)
        step = DecodeMetadata(block_table, token_lens, queries, int(segment_lens.max()), self.workspace, index)
        return tuple(step.parts(self.part_len))

    def uniform(
        self, block_table: Tensor, seq_lens: Tensor, local_seq_lens: Tensor, query_len: int
    ) -> tuple[Part, ...]:
        """Lay out requests that have query_len new tokens each, whole; arguments as for `build`."""
        if query_len > 1:
            local_seq_lens = self._uniform_lens(seq_lens, query_len)
        step = DecodeMetadata(block_table, local_seq_lens, None, query_len, self.workspace)
        return ((slice(0, len(block_table) * query_len), step),)

    def _uniform_lens(self, seq_lens: Tensor, query_len: int) -> Tensor:
        """Return [n query_len], local lengths of requests [n] that have query_len new tokens each, in `token_lens`."""
        after = torch.arange(1 - query_len, 1, device=seq_lens.device)
        local = self._local(seq_lens[:, None] + after).flatten()
        return self.token_lens[: len(local)].copy_(local)

    def _ragged_lens(self, seq_lens: Tensor, query_start_loc: Tensor, num_tokens: int) -> Tensor:
        """Return [num_tokens], local lengths of requests [n] whose new tokens start at query_start_loc [n + 1]."""
        # The host knows only a bound on the lengths of requests whose drafts are not verified yet.
        request = torch.repeat_interleave(query_start_loc.diff(), output_size=num_tokens)
        before_first = seq_lens - query_start_loc[1:]
        return self._local(before_first[request] + torch.arange(1, num_tokens + 1, device=seq_lens.device))

    def _local(self, seen: Tensor) -> Tensor:
        """Return this rank's share of the first `seen` tokens, int32; zero for the padding of a graph."""
        dcp = self.steps.dcp
        size, interleave = dcp.decode_context_parallel_size, dcp.cp_kv_cache_interleave_size
        return ownership.local_seq_lens(seen.clamp(min=0), size, self.steps.dcp_rank, interleave)
