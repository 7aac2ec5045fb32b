"""The layout of a step. Whatever picks a collective or its size comes from global lengths, so all ranks of a DCP group
build the same sequence of exchanges.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dcpmla import ownership
from dcpmla.attention.calls import Segments, decode_workspace
from dcpmla.attention.step import ContextChunk, DecodeMetadata, PrefillMetadata, SparseMetadata, StepMetadata
from dcpmla.config import DCPConfig
from dcpmla.upload import upload


@dataclass(frozen=True)
class StepBuilder:
    """Steps of one rank over caches of one layout, from numbers on the host to tensors on a device."""

    dcp: DCPConfig
    dcp_rank: int
    device: torch.device | str

    def build(
        self,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        max_decode_query_len: int,
        num_decodes: int | None,
        workspace: Tensor | None,
        is_sparse: bool,
    ) -> StepMetadata:
        """Lay out a step; `StepMetadata.build` documents arguments and errors."""
        check_requests(query_lens, seq_lens, block_tables, self.dcp.virtual_block_size)
        if num_decodes is None:
            num_decodes = leading_decodes(query_lens, max_decode_query_len)
        elif not 0 <= num_decodes <= len(query_lens):
            raise ValueError(f"num_decodes is {num_decodes}; it must be in [0, {len(query_lens)}], of all requests")
        num_decode_tokens = sum(query_lens[:num_decodes])
        decode_columns = _num_blocks(max(seq_lens[:num_decodes], default=0), self.dcp)
        table = pad_table(block_tables, seq_lens, self.dcp.virtual_block_size)
        request = np.arange(len(query_lens), dtype=np.int32)
        if max(query_lens) > 1:
            request = np.repeat(request, query_lens)
        positions = positions_of(query_lens, seq_lens)
        # One upload for all: decodes read the front of the arrays that prefills and sparse layers need.
        slots = self._slots(positions, table[request, positions // self.dcp.virtual_block_size])
        arrays = [
            table.astype(np.int32),
            self._local_seq_lens(positions if is_sparse else positions[:num_decode_tokens]),
            positions,
            slots,
        ]
        if is_sparse:
            arrays += request, (positions + 1).astype(np.int32)
        block_table, local_seq_lens, positions_there, slot_mapping, *of_sparse = upload(arrays, self.device)
        decode = prefill = sparse = None
        if num_decodes:
            local = block_table[:num_decodes, :decode_columns], local_seq_lens[:num_decode_tokens]
            decode = self._decode(query_lens[:num_decodes], max_decode_query_len, *local, workspace)
        if num_decodes < len(query_lens):
            prefill = self.prefill(query_lens[num_decodes:], seq_lens[num_decodes:], block_table[num_decodes:])
        if is_sparse:
            request_there, seen = of_sparse
            sparse = SparseMetadata(block_table, request_there, seen, local_seq_lens, max(seq_lens))
        return StepMetadata(
            num_tokens=len(positions),
            num_decode_tokens=num_decode_tokens,
            num_blocks=int(table.max()) + 1,
            positions=positions_there,
            slot_mapping=slot_mapping,
            decode=decode,
            prefill=prefill,
            sparse=sparse,
        )

    def _slots(self, positions: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        """Return the slot [T] of each token on this rank; blocks [T] holds only each token's block, because whole rows
        of the table would be [T, max_blocks].
        """
        size, interleave = self.dcp.decode_context_parallel_size, self.dcp.cp_kv_cache_interleave_size
        offsets = positions % self.dcp.virtual_block_size
        slots = blocks * self.dcp.block_size + ownership.local_index(offsets, size, interleave)
        return np.where(ownership.owner_rank(offsets, size, interleave) == self.dcp_rank, slots, -1)

    def _local_seq_lens(self, positions: np.ndarray) -> np.ndarray:
        """Return how many tokens at each position [T] and before it are this rank's, int32 [T]."""
        size, interleave = self.dcp.decode_context_parallel_size, self.dcp.cp_kv_cache_interleave_size
        return ownership.local_seq_lens(positions + 1, size, self.dcp_rank, interleave)

    def _decode(
        self,
        query_lens: Sequence[int],
        max_query_len: int,
        block_table: Tensor,
        local_seq_lens: Tensor,
        workspace: Tensor | None,
    ) -> DecodeMetadata:
        lens, index = np.asarray(query_lens), None
        if lens.max() > max_query_len:
            lens, request = cut_queries(lens, max_query_len)
            index = self._upload(request)
        return DecodeMetadata(
            block_table=block_table,
            local_seq_lens=local_seq_lens,
            queries=None if lens.min() == lens.max() else self._segments(lens),
            max_query_len=int(lens.max()),
            workspace=decode_workspace(self.device) if workspace is None else workspace,
            request_index=index,
        )

    def prefill(self, query_lens: Sequence[int], seq_lens: Sequence[int], table: Tensor) -> PrefillMetadata:
        """Lay out a step's prefills, without waiting for the device.

        Args:
            query_lens, seq_lens: New tokens of each request, and its tokens after this step, each [num_prefills].
            table: Block ids of each request [num_prefills, max_blocks], integers on the device, enough for seq_lens.
        """
        new = np.asarray(query_lens)
        context_lens = np.asarray(seq_lens) - new
        chunks = [self._chunk(*bounds, table) for bounds in chunk_bounds(context_lens, self.dcp)]
        return PrefillMetadata(
            queries=self._segments(query_lens),
            first_position=self._upload(context_lens.astype(np.int32)),
            context_chunks=tuple(chunks),
        )

    def _chunk(self, begin: np.ndarray, end: np.ndarray, table: Tensor) -> ContextChunk:
        """Return the chunk of positions [begin[i], end[i]) of each request i; every non-empty begin is aligned.

        Only numbers per request come from the host; numbers per token are computed on the device.
        """
        size, interleave = self.dcp.decode_context_parallel_size, self.dcp.cp_kv_cache_interleave_size
        lens = end - begin
        # Rank 0 owns the first group of an aligned chunk, so no rank has more of it: all ranks pad to rank 0's rows.
        padded_lens = -(-lens // (size * interleave)) * interleave
        start, padded_start = _starts(lens), _starts(padded_lens)
        # Offsets from a token's number in the chunk to its position, and from a row to its index among this rank's.
        before = begin - start[:-1], begin // size - padded_start[:-1]
        numbers, first_position = upload(
            [np.stack([lens, padded_lens, end, *before]), begin.astype(np.int32)], self.device
        )
        num_tokens, num_rows, end_there, before_token, before_row = numbers

        request = torch.repeat_interleave(num_tokens, output_size=start[-1])
        position = torch.arange(start[-1], device=self.device) + before_token[request]
        row = ownership.local_index(position, size, interleave) - before_row[request]
        order = ownership.owner_rank(position, size, interleave) * padded_start[-1] + row

        request = torch.repeat_interleave(num_rows, output_size=padded_start[-1])
        index = torch.arange(padded_start[-1], device=self.device) + before_row[request]
        position = ownership.global_position(index, self.dcp_rank, size, interleave)
        tokens = torch.where(position < end_there[request], position - before_token[request], -1)
        # Padding reads whatever follows the last token in its block; `order` never points at it.
        block = table[request, index // self.dcp.block_size].to(torch.int64)
        slots = block * self.dcp.block_size + index % self.dcp.block_size
        return ContextChunk(slots, order, tokens, self._segments(lens), first_position)

    def _segments(self, lens: Sequence[int] | np.ndarray) -> Segments:
        start = _starts(lens)
        return Segments(start, self._upload(np.asarray(start, dtype=np.int32)))

    def _upload(self, array: np.ndarray) -> Tensor:
        return upload([array], self.device)[0]


def context_workspace_tokens(max_model_len: int, max_num_seqs: int, dcp: DCPConfig) -> int:
    """Return how many cached tokens to gather and up-project at a time: at least one aligned chunk of every request,
    and at most 64k tokens beyond that.

    Source: vLLM's chunked-prefill workspace for MLA.
    """
    page = dcp.chunk_alignment
    return max(min(max(8 * max_model_len, 4 * max_num_seqs * page), 65536), max_num_seqs * page)


def chunk_bounds(context_lens: np.ndarray, dcp: DCPConfig) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the positions [begin, end) of each request's context in each chunk, two arrays [num_prefills].

    The remaining contexts share a chunk equally; long ones get the space that short ones do not need.
    """
    alignment = dcp.chunk_alignment
    room = dcp.context_workspace_tokens // alignment
    begin = np.zeros_like(context_lens)
    while (begin < context_lens).any():
        shares = _share(-(-(context_lens - begin) // alignment), room)
        end = np.minimum(context_lens, begin + shares * alignment)
        yield begin, end
        begin = end


def _share(needs: np.ndarray, room: int) -> np.ndarray:
    """Share room among needs, integers [N], in equal parts that do not exceed their needs."""
    shares = np.zeros_like(needs)
    while room and (is_open := shares < needs).any():
        more = np.minimum(needs - shares, max(1, room // int(is_open.sum())))
        more[np.cumsum(more) > room] = 0  # too little room for one each: the first get it
        shares += more
        room -= int(more.sum())
    return shares


def leading_decodes(query_lens: Sequence[int], max_query_len: int) -> int:
    """Return how many requests at the front have at most max_query_len new tokens."""
    return next((index for index, length in enumerate(query_lens) if length > max_query_len), len(query_lens))


def cut_queries(lens: np.ndarray, max_query_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut requests into pieces of max_query_len tokens; return the pieces' lengths, and each one's request, int32."""
    num_pieces = -(-lens // max_query_len)
    request = np.repeat(np.arange(len(lens), dtype=np.int32), num_pieces)
    pieces = np.full(len(request), max_query_len)
    pieces[np.cumsum(num_pieces) - 1] = lens - (num_pieces - 1) * max_query_len
    return pieces, request


def _starts(lens: Sequence[int] | np.ndarray) -> tuple[int, ...]:
    """Return the start of each length, and the total."""
    return (0, *np.cumsum(lens).tolist())


def _num_blocks(seq_len: int, dcp: DCPConfig) -> int:
    return -(-seq_len // dcp.virtual_block_size)


def positions_of(query_lens: Sequence[int], seq_lens: Sequence[int]) -> np.ndarray:
    """Return the positions [T] int64 of all requests' new tokens."""
    if max(query_lens) == 1:
        return np.asarray(seq_lens, dtype=np.int64) - 1
    before_first = np.subtract(seq_lens, np.cumsum(query_lens))  # offset from number in batch
    return np.arange(sum(query_lens)) + np.repeat(before_first, query_lens)


def pad_table(
    block_tables: Sequence[Sequence[int]], seq_lens: Sequence[int], block_tokens: int
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return [num_reqs, max_blocks] int64: the blocks of each request, then block 0, which nothing reads.

    Args:
        block_tokens: Number of positions that a block id covers.
    Raises:
        ValueError: A block id is negative.
    """
    num_columns = -(-max(seq_lens) // block_tokens)
    table = np.zeros((len(block_tables), num_columns), dtype=np.int64)
    for row, blocks, seq_len in zip(table, block_tables, seq_lens, strict=True):
        num_blocks = -(-seq_len // block_tokens)
        row[:num_blocks] = blocks[:num_blocks]
    if table.min() < 0:
        request, column = np.argwhere(table < 0)[0]
        raise ValueError(f"request {request}: block_tables has block {table[request, column]}; ids start at 0")
    return table


def check_requests(
    query_lens: Sequence[int], seq_lens: Sequence[int], block_tables: Sequence[Sequence[int]], block_tokens: int
) -> None:
    """Raise ValueError if lengths do not match or a block table is too short."""
    if not query_lens or not len(query_lens) == len(seq_lens) == len(block_tables):
        raise ValueError(
            f"query_lens, seq_lens and block_tables have {len(query_lens)}, {len(seq_lens)} and {len(block_tables)} "
            f"requests; they must have the same number, at least 1"
        )
    for request, (query, seq, blocks) in enumerate(zip(query_lens, seq_lens, block_tables, strict=True)):
        if not 1 <= query <= seq:
            raise ValueError(
                f"request {request}: query_lens is {query} and seq_lens {seq}; 1 <= query_lens <= seq_lens must hold"
            )
        if len(blocks) * block_tokens < seq:
            raise ValueError(
                f"request {request}: block_tables has {len(blocks)} blocks, room for "
                f"{len(blocks) * block_tokens} tokens; seq_lens is {seq}"
            )
