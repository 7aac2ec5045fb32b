"""The layout of a step over the caches of DeepSeek-V4's attention, from numbers on the host to tensors on a device."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from dcpmla.attention.build import GraphRows, HostStep, StepBuilder
from dcpmla.attention.calls import decode_workspace
from dcpmla.attention.chunks import ChunkBuilder
from dcpmla.attention.compressed.cache import CompressedPlan
from dcpmla.attention.compressed.config import LayerKind
from dcpmla.attention.compressed.step import CompressedMetadata, ContextRows, selects
from dcpmla.attention.step import ContextChunk, StepMetadata, StepRequests
from dcpmla.attention.token_rows import with_graph_rows, with_token_rows
from dcpmla.upload import upload


class CompressedStepBuilder(StepBuilder):
    """Builder of one rank's steps over caches of one plan."""

    has_slots = absorbs_pieces = has_static_decodes = False

    def __init__(self, plan: CompressedPlan, dcp_rank: int, device: torch.device | str = "cpu") -> None:
        super().__init__(plan.dcp, dcp_rank, device)
        self.plan, self.block_tokens, self.num_states = plan, plan.block_tokens, plan.num_states

    def build(
        self,
        requests: StepRequests,
        max_decode_query_len: int = 1,
        num_decodes: int | None = None,
        workspace: Tensor | None = None,
    ) -> StepMetadata:
        """Lay out a step as `StepBuilder.build` does.

        Raises:
            ValueError: A decode has more tokens than the window's ring has rows for, or a reason of `StepBuilder`.
        """
        limit = self.decode_query_len(max_decode_query_len)
        if num_decodes is not None and max(requests.query_lens[:num_decodes], default=0) > limit:
            raise ValueError(
                f"num_decodes is {num_decodes}; of {list(requests.query_lens)} new tokens decodes have at most {limit}"
            )
        return super().build(requests, max_decode_query_len, num_decodes, workspace)

    def decode_query_len(self, max_decode_query_len: int) -> int:
        """Return the maximum new tokens of a decode. It reads its window after its tokens are written, so all but one
        token need rows in addition to the window's.
        """
        return min(max_decode_query_len, self.plan.ring_rows - self.plan.config.sliding_window + 1)

    def columns(self, host: HostStep) -> list[np.ndarray]:
        """Return each token's request, and each request's first position, length and state."""
        query_lens, seq_lens, _, states = host.requests
        return [host.request, np.array([np.subtract(seq_lens, query_lens), seq_lens, states], dtype=np.int32)]

    def extend(self, step: StepMetadata, host: HostStep, block_table: Tensor, arrays: Sequence[Tensor]) -> StepMetadata:
        """Return the step with the numbers that layers with entries read."""
        request, (first_position, seq_lens, states) = arrays
        numbers = step.positions, request, first_position, seq_lens, states, block_table
        compressed = CompressedMetadata(self.plan, self.owner, *numbers, max(host.requests.seq_lens))
        workspace = None if step.decode is None else step.decode.workspace
        step = step.with_kind(replace(compressed, context=self._context(host, compressed, workspace)))
        return with_token_rows(step, request, block_table) if self.plan.keeps_token_ids else step

    def extend_graph(self, step: StepMetadata, rows: GraphRows) -> StepMetadata:
        """Return the step of a decode graph with the numbers that layers with entries read."""
        seen = rows.seq_lens.view(-1, rows.query_len)  # 0 for padding
        first, seq_lens = seen[:, 0] - 1, seen[:, -1].contiguous()
        numbers = rows.positions, rows.request, first, seq_lens, rows.states, rows.block_table
        step = step.with_kind(CompressedMetadata(self.plan, self.owner, *numbers, rows.max_seq_len))
        return with_graph_rows(step, rows) if self.plan.keeps_token_ids else step

    def _context(self, host: HostStep, step: CompressedMetadata, workspace: Tensor | None) -> ContextRows | None:
        """Return the context of prefills; None without prefills. A workspace is allocated if the step has none yet."""
        query_lens, seq_lens, _, states = host.requests
        num_decodes = host.num_decodes
        new, end = np.asarray(query_lens[num_decodes:]), np.asarray(seq_lens[num_decodes:])
        if not len(new):
            return None
        start, ring = end - new, self.plan.ring_rows
        first = np.maximum(start - self.plan.config.sliding_window + 1, 0)  # first token that the first new token sees
        slots = [
            np.arange(begin, stop) % ring + state * ring
            for begin, stop, state in zip(first, start, states[num_decodes:], strict=True)
        ]
        num_window = start - first
        window_start, new_start = np.cumsum(num_window) - num_window, np.cumsum(new) - new
        per_token = (
            np.repeat(x, new).astype(np.int32) for x in (first, window_start, num_window.sum() + new_start - start)
        )
        rings = np.arange(1 + max(self.plan.config.rings))[:, None] * self.plan.rows_per_ring
        columns = [*per_token, rings + np.concatenate(slots)]
        first_position, first_row, new_row, window_slots = upload(columns, self.device)
        return ContextRows(
            window_slots=window_slots,
            first_position=first_position,
            first_row=first_row,
            new_row=new_row,
            chunks={
                (kind.ratio, kind.selects): self._chunks_of(kind, int(new.sum()), end // kind.ratio, step)
                for kind in {(kind.ratio, kind.selects): kind for kind in self.plan.config.layer_kinds}.values()
                if kind.ratio
            },
            workspace=decode_workspace(self.device) if workspace is None else workspace,
        )

    def _chunks_of(
        self, kind: LayerKind, num_tokens: int, num_entries: np.ndarray, step: CompressedMetadata
    ) -> tuple[ContextChunk, ...]:
        """Return the chunks of all entries of prefills, so many each [num_prefills], in layers of a kind; none where
        entries are selected and queries move instead. Numbers that are the same on all ranks decide.
        """
        if selects(step, kind) and self.plan.config.moves_queries(self.dcp, num_tokens, int(num_entries.sum())):
            return ()
        builder = ChunkBuilder(self.dcp, self.owner, self.device, self.plan.entries_per_block(kind.ratio))
        table = step.entry_table(kind.ratio)[-len(num_entries) :]
        alignment = self.dcp.decode_context_parallel_size * self.dcp.cp_kv_cache_interleave_size
        return builder.build_all(num_entries, alignment, table)
