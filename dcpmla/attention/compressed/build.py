"""The layout of a step over the caches of DeepSeek-V4's attention, from numbers on the host to tensors on a device."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dcpmla.attention.build import StepBuilder, check_requests, leading_decodes, pad_table, positions_of
from dcpmla.attention.compressed.step import CompressedMetadata, ContextRows
from dcpmla.attention.step import ContextChunk, StepMetadata
from dcpmla.cache.compressed import CompressedPlan
from dcpmla.upload import upload


@dataclass(frozen=True)
class CompressedStepBuilder(StepBuilder):
    """Steps of one rank over caches of one plan; dcp.block_size counts tokens (`of`)."""

    plan: CompressedPlan

    @classmethod
    def of(cls, plan: CompressedPlan, dcp_rank: int, device: torch.device | str) -> "CompressedStepBuilder":
        """Return the builder for a plan's caches."""
        tokens_per_block = plan.dcp.block_size * plan.config.row_tokens
        return cls(replace(plan.dcp, block_size=tokens_per_block), dcp_rank, device, plan)

    def build_compressed(
        self,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        states: Sequence[int],
        max_decode_query_len: int,
        num_decodes: int | None,
        workspace: Tensor | None,
    ) -> StepMetadata:
        """Lay out a step; `StepMetadata.build` documents arguments and errors."""
        check_requests(query_lens, seq_lens, block_tables, self.dcp.virtual_block_size)
        check_states(states, len(query_lens), self.plan.num_states)
        # A decode reads its window after its tokens are written: all but one token need rows besides the window's.
        most = min(max_decode_query_len, self.plan.ring_rows - self.plan.config.sliding_window + 1)
        if num_decodes is None:
            num_decodes = leading_decodes(query_lens, most)
        elif max(query_lens[:num_decodes], default=0) > most:
            raise ValueError(
                f"num_decodes is {num_decodes}; of {list(query_lens)} new tokens decodes have at most {most}"
            )
        num_decode_tokens = sum(query_lens[:num_decodes])
        table = pad_table(block_tables, seq_lens, self.dcp.virtual_block_size)
        positions = positions_of(query_lens, seq_lens)
        request = np.repeat(np.arange(len(query_lens), dtype=np.int32), query_lens)
        # One upload for all.
        per_request = np.array([np.subtract(seq_lens, query_lens), seq_lens, states], dtype=np.int32)
        lens, slots = self._local_seq_lens(positions[:num_decode_tokens]), np.full(len(positions), -1)
        arrays = [table.astype(np.int32), lens, positions, slots, request, per_request]
        block_table, lens_there, positions_there, slot_mapping, request_there, numbers = upload(arrays, self.device)
        first_position, seq_lens_there, states_there = numbers
        decode = None
        if num_decodes:
            decode = self._decode(query_lens[:num_decodes], most, block_table[:num_decodes], lens_there, workspace)
        return StepMetadata(
            num_tokens=len(positions),
            num_decode_tokens=num_decode_tokens,
            num_blocks=int(table.max()) + 1,
            positions=positions_there,
            slot_mapping=slot_mapping,
            decode=decode,
            prefill=None,
            compressed=CompressedMetadata(
                plan=self.plan,
                dcp_rank=self.dcp_rank,
                positions=positions_there,
                request=request_there,
                first_position=first_position,
                seq_lens=seq_lens_there,
                states=states_there,
                block_table=block_table,
                max_seq_len=max(seq_lens),
                context=self._context(num_decodes, query_lens, seq_lens, states, block_table),
            ),
        )

    def _context(
        self,
        num_decodes: int,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        states: Sequence[int],
        table: Tensor,
    ) -> ContextRows | None:
        """Return the context of prefills; None without prefills."""
        new, end = np.asarray(query_lens[num_decodes:]), np.asarray(seq_lens[num_decodes:])
        if not len(new):
            return None
        start, ring = end - new, self.plan.ring_rows
        first = np.maximum(start - self.plan.config.sliding_window + 1, 0)  # first token that the first new one sees
        slots = [
            np.arange(begin, stop) % ring + state * ring
            for begin, stop, state in zip(first, start, states[num_decodes:], strict=True)
        ]
        num_window = start - first
        window_start, new_start = np.cumsum(num_window) - num_window, np.cumsum(new) - new
        per_token = (
            np.repeat(x, new).astype(np.int32) for x in (first, window_start, num_window.sum() + new_start - start)
        )
        first_position, first_row, new_row = map(self._upload, per_token)
        return ContextRows(
            window_slots=self._upload(np.concatenate(slots)),
            first_position=first_position,
            first_row=first_row,
            new_row=new_row,
            entries={ratio: self._entries(ratio, end, table[num_decodes:]) for ratio in self.plan.config.ratios},
        )

    def _entries(self, ratio: int, end: np.ndarray, table: Tensor) -> ContextChunk:
        """Return all entries of requests that end at positions [num_prefills], as one chunk."""
        per_block = self.plan.entries_per_block(ratio)
        of_entries = StepBuilder(replace(self.dcp, block_size=per_block), self.dcp_rank, self.device)
        table = table + self.plan.window_rows // per_block
        return of_entries._chunk(np.zeros_like(end), end // ratio, table)


def check_states(states: Sequence[int], num_reqs: int, num_states: int) -> None:
    """Raise ValueError if a cache does not have a state, or two requests share one."""
    wrong = [state for state in states if not 0 <= state < num_states]
    if len(states) != num_reqs or wrong or len(set(states)) != num_reqs:
        raise ValueError(
            f"states is {list(states)}; expected one for each of {num_reqs} requests, in [0, {num_states}), none twice"
        )
