"""The layout of a step, from numbers on the host to tensors on a device.

Global lengths alone determine the collectives and their sizes, so all ranks of a DCP group build the same sequence of
exchanges.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dcpmla.attention.calls import decode_workspace
from dcpmla.attention.chunks import ChunkBuilder, cut_queries, pad_table, positions_of, segments_of
from dcpmla.attention.step import DecodeMetadata, PrefillMetadata, StepMetadata, StepRequests
from dcpmla.config import DCPConfig
from dcpmla.upload import upload


class HostStep(NamedTuple):
    """A step on the host. Decodes are the first requests, and their tokens the first tokens.

    Attributes:
        requests: Requests of the step.
        num_decodes, num_decode_tokens: Number of decodes, and of their new tokens.
        table: Block ids of each request [num_reqs, max_blocks], int64.
        request: Request of each token [T], int32.
        positions: Position of each token in its sequence [T], int64.
    """

    requests: StepRequests
    num_decodes: int
    num_decode_tokens: int
    table: np.ndarray
    request: np.ndarray
    positions: np.ndarray


class GraphRows(NamedTuple):
    """The static tensors of a graph's tokens, which attend with absorbed queries.

    Attributes:
        query_len: Rows of each request; 0 if requests differ.
        max_seq_len: Upper bound of seq_lens.
        block_table: Block ids of each request [num_reqs, max_blocks], int32.
        states: State of each request [num_reqs], int32; -1 for padding.
        request: Request of each row [rows], int32.
        positions: Position of each row's token [rows], int64.
        seq_lens, local_seq_lens: Number of tokens of the row's request up to and including the row's own, on all ranks
            and on this one [rows], int32; 0 for padding.
    """

    query_len: int
    max_seq_len: int
    block_table: Tensor
    states: Tensor
    request: Tensor
    positions: Tensor
    seq_lens: Tensor
    local_seq_lens: Tensor


class StepBuilder:
    """Builder of one rank's steps of dense MLA. Other kinds of attention derive theirs from it.

    Args:
        dcp: Layout of the cache over the ranks.
        dcp_rank: Rank in the DCP group.
        device: Device of the steps' tensors.
    Attributes:
        owner: This rank, as the owner of tokens.
        block_tokens: Positions that a block id covers, over all ranks.
        chunks: Builder of context chunks.
        num_states: Number of requests' states in the cache; 0 where it has none.
        has_slots: Whether each token has a slot in the cache's blocks.
        absorbs_pieces: Whether pieces of prompts, of any number of tokens, may attend with absorbed queries.
        has_static_decodes: Whether the graphs of a step with prompts can include the attention of its decodes.

    The class has dense MLA's values. DeepSeek-V4 and linear attention have states and absorb no pieces. Only dense MLA
    has static decodes.
    """

    num_states = 0
    has_slots = True
    absorbs_pieces = True
    has_static_decodes = True

    def __init__(self, dcp: DCPConfig, dcp_rank: int, device: torch.device | str = "cpu") -> None:
        self.dcp, self.owner, self.device = dcp, dcp.owner(dcp_rank), device
        self.block_tokens = dcp.virtual_block_size
        self.chunks = ChunkBuilder(dcp, self.owner, device, dcp.block_size)

    def build(
        self,
        requests: StepRequests,
        max_decode_query_len: int = 1,
        num_decodes: int | None = None,
        workspace: Tensor | None = None,
    ) -> StepMetadata:
        """Lay out a step, without waiting for the device.

        cos_sin and query_factor are still missing: the model adds them (`AttentionKind.prepare`).

        Args:
            requests: Requests of the step, decodes first.
            max_decode_query_len: Maximum tokens of a segment; decodes with more new tokens are cut into segments.
            num_decodes: Number of decodes, whatever their length; pieces of prompts that attend with absorbed queries
                (`attention/routes.py`) are decodes, too. None counts the requests before the first one with more than
                max_decode_query_len new tokens.
            workspace: Memory from `decode_workspace`, shared by consecutive steps on one stream; None allocates it for
                this step.
        Raises:
            ValueError: Lengths do not match, a block table is too short, a block id is negative, num_decodes is
                outside [0, num_reqs], or states are missing, out of range or given twice.
        """
        self.check(requests)
        max_query_len = self.decode_query_len(max_decode_query_len)
        host = self.on_host(requests, max_query_len, num_decodes)
        arrays = [
            host.table.astype(np.int32),
            self.local_seq_lens(host.positions[: host.num_decode_tokens]),
            host.positions,
            self.slots(host),
            *self.columns(host),
        ]
        block_table, local_seq_lens, positions, slot_mapping, *of_kind = upload(arrays, self.device)
        decode = prefill = None
        if host.num_decodes:
            decode = self._decode(host, max_query_len, block_table, local_seq_lens, workspace)
        if self.has_slots and host.num_decodes < len(requests.query_lens):
            prefills = slice(host.num_decodes, None)
            prefill = self.prefill(requests.query_lens[prefills], requests.seq_lens[prefills], block_table[prefills])
        step = StepMetadata(
            num_tokens=len(positions),
            num_decode_tokens=host.num_decode_tokens,
            num_blocks=int(host.table.max()) + 1,
            positions=positions,
            slot_mapping=slot_mapping,
            decode=decode,
            prefill=prefill,
        )
        return self.extend(step, host, block_table, of_kind)

    def columns(self, host: HostStep) -> list[np.ndarray]:
        """Return the arrays that this kind of attention adds to the upload of `build`."""
        return []

    def extend(self, step: StepMetadata, host: HostStep, block_table: Tensor, arrays: Sequence[Tensor]) -> StepMetadata:
        """Return the step with the metadata that only this kind of attention reads.

        Args:
            block_table: Block ids of each request [num_reqs, max_blocks], int32.
            arrays: Arrays that the method `columns` returned, on the device.
        """
        return step

    def extend_graph(self, step: StepMetadata, rows: GraphRows) -> StepMetadata:
        """Return the step of a decode graph with the metadata that only this kind of attention reads."""
        return step

    def mixed_numbers(self, requests: StepRequests, num_reqs: int, num_tokens: int) -> np.ndarray:
        """Return the numbers, int32, that layers of this kind read inside the graphs of a step with prompts.

        Args:
            requests: Requests of the step; one of state -1 is padding.
            num_reqs, num_tokens: Number of requests and of tokens that the step is padded to.
        """
        return np.empty(0, dtype=np.int32)

    def extend_mixed(self, step: StepMetadata, numbers: Tensor, num_reqs: int) -> StepMetadata:
        """Return the step of such graphs with its numbers (`mixed_numbers`), in static memory."""
        return step

    def check(self, requests: StepRequests) -> None:
        """Raise ValueError for lengths that do not match, a short block table, and states as `build` documents."""
        query_lens, seq_lens, block_tables, states = requests
        if not query_lens or not len(query_lens) == len(seq_lens) == len(block_tables):
            raise ValueError(
                f"query_lens, seq_lens and block_tables have {len(query_lens)}, {len(seq_lens)} and "
                f"{len(block_tables)} requests; they must have the same number, at least 1"
            )
        for request, (query, seq, blocks) in enumerate(zip(query_lens, seq_lens, block_tables, strict=True)):
            if not 1 <= query <= seq:
                raise ValueError(
                    f"request {request}: query_lens is {query} and seq_lens {seq}; 1 <= query_lens <= seq_lens must "
                    f"hold"
                )
            if len(blocks) * self.block_tokens < seq:
                raise ValueError(
                    f"request {request}: block_tables has {len(blocks)} blocks, room for "
                    f"{len(blocks) * self.block_tokens} tokens; seq_lens is {seq}"
                )
        num_reqs = len(query_lens)
        if self.num_states and not (
            len(states) == len(set(states)) == num_reqs and all(0 <= state < self.num_states for state in states)
        ):
            raise ValueError(
                f"states is {list(states)}; expected one for each of {num_reqs} requests, in [0, {self.num_states}), "
                f"none twice"
            )

    def decode_query_len(self, max_decode_query_len: int) -> int:
        """Return the maximum tokens of a segment: the argument, or fewer in DeepSeek-V4."""
        return max_decode_query_len

    def local_seq_lens(self, positions: np.ndarray) -> np.ndarray:
        """Return the number of this rank's tokens up to and including each position [T], int32 [T]."""
        return self.owner.local_seq_lens(positions + 1)

    def prefill(self, query_lens: Sequence[int], seq_lens: Sequence[int], table: Tensor) -> PrefillMetadata:
        """Lay out a step's prefills, without waiting for the device.

        Args:
            query_lens, seq_lens: New tokens of each request, and its tokens after this step, each [num_prefills].
            table: Block ids of each request [num_prefills, max_blocks], integers on the device, enough for seq_lens.
        """
        context_lens = np.subtract(seq_lens, query_lens)
        # In a fixed order keys are one sequence, so new tokens are read after their context.
        lens = np.asarray(seq_lens) if self.dcp.deterministic and context_lens.any() else context_lens
        return PrefillMetadata(
            queries=segments_of(query_lens, self.device),
            first_position=upload([context_lens.astype(np.int32)], self.device)[0],
            context_chunks=self.chunks.build_all(lens, self.dcp.chunk_alignment, table),
        )

    def on_host(self, requests: StepRequests, max_query_len: int, num_decodes: int | None) -> HostStep:
        """Return a step on the host. Without num_decodes, the requests before the first one with more than
        max_query_len new tokens are decodes.
        """
        query_lens, seq_lens, block_tables, _ = requests
        if num_decodes is None:
            longer = (index for index, length in enumerate(query_lens) if length > max_query_len)
            num_decodes = next(longer, len(query_lens))
        elif not 0 <= num_decodes <= len(query_lens):
            raise ValueError(f"num_decodes is {num_decodes}; it must be in [0, {len(query_lens)}], 0 to all requests")
        request = np.arange(len(query_lens), dtype=np.int32)
        if max(query_lens) > 1:
            request = np.repeat(request, query_lens)
        return HostStep(
            requests,
            num_decodes,
            sum(query_lens[:num_decodes]),
            pad_table(block_tables, seq_lens, self.block_tokens),
            request,
            positions_of(query_lens, seq_lens),
        )

    def slots(self, host: HostStep) -> np.ndarray:
        """Return the slot [T] of each token on this rank, -1 where another rank owns the token.

        It reads one block id for each token; `Owner.slot_mapping` would need a whole row of the table for each.
        """
        if not self.has_slots:
            return np.full(len(host.positions), -1)
        blocks = host.table[host.request, host.positions // self.block_tokens]
        offsets = host.positions % self.block_tokens
        slots = blocks * self.dcp.block_size + self.owner.local_index(offsets)
        return np.where(self.owner.rank_of(offsets) == self.owner.rank, slots, -1)

    def _decode(
        self,
        host: HostStep,
        max_query_len: int,
        block_table: Tensor,
        local_seq_lens: Tensor,
        workspace: Tensor | None,
    ) -> DecodeMetadata:
        lens, index = np.asarray(host.requests.query_lens[: host.num_decodes]), None
        if lens.max() > max_query_len:
            lens, request = cut_queries(lens, max_query_len)
            index = upload([request], self.device)[0]
        num_columns = -(-max(host.requests.seq_lens[: host.num_decodes]) // self.block_tokens)
        return DecodeMetadata(
            block_table=block_table[: host.num_decodes, :num_columns],
            local_seq_lens=local_seq_lens,
            queries=None if lens.min() == lens.max() else segments_of(lens, self.device),
            max_query_len=int(lens.max()),
            workspace=decode_workspace(self.device) if workspace is None else workspace,
            request_index=index,
        )
