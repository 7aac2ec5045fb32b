"""Requests of a step in flat arrays, and their cached contexts in chunks: the rows that each rank brings to a gather,
and the order of tokens in the gather's result.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dcpmla.attention.calls import Segments
from dcpmla.attention.step import ContextChunk
from dcpmla.config import DCPConfig
from dcpmla.ownership import Owner
from dcpmla.upload import upload


@dataclass(frozen=True)
class ChunkBuilder:
    """Builder of the chunks of steps, with the rows that one rank brings.

    Attributes:
        dcp: Layout of the cache over the ranks.
        owner: Rank whose rows they are.
        device: Device of the chunks' tensors.
        rows_per_block: Rows of a block on one rank.
    """

    dcp: DCPConfig
    owner: Owner
    device: torch.device | str
    rows_per_block: int

    def build_all(self, lens: np.ndarray, alignment: int, table: Tensor) -> tuple[ContextChunk, ...]:
        """Cut contexts of the given lengths into chunks of at most dcp.context_workspace_tokens (`chunk_bounds`)."""
        bounds = chunk_bounds(lens, self.dcp.context_workspace_tokens, alignment)
        return tuple(self.build(begin, end, table) for begin, end in bounds)

    def build(self, begin: np.ndarray, end: np.ndarray, table: Tensor) -> ContextChunk:
        """Return the chunk of positions [begin[i], end[i]) of each request i.

        Only numbers per request come from the host; numbers per token are computed on the device.

        Args:
            begin, end: Positions [num_reqs]. In a range that is not empty, begin must be a multiple of W I.
            table: Block ids of each request [num_reqs, max_blocks], integers on the device.
        """
        owner = self.owner if self.owner.size > 1 else Owner()  # one rank has all tokens in order
        size, interleave = owner.size, owner.interleave
        lens = end - begin
        # Rank 0 stores the first I tokens of each range, so it has the most. All ranks pad to rank 0's number, rounded
        # up to a multiple of I.
        padded_lens = -(-lens // (size * interleave)) * interleave
        start, padded_start = starts_of(lens), starts_of(padded_lens)
        # Offsets of each request: position = token in the chunk + first offset; local index = row + second offset.
        offsets = begin - start[:-1], begin // size - padded_start[:-1]
        numbers, first_position = upload(
            [np.stack([lens, padded_lens, end, *offsets]), begin.astype(np.int32)], self.device
        )
        # The same numbers on the device, [num_reqs] each.
        range_tokens, range_rows, range_end, token_offset, row_offset = numbers

        request = torch.repeat_interleave(range_tokens, output_size=start[-1])
        position = torch.arange(start[-1], device=self.device) + token_offset[request]
        row = owner.local_index(position) - row_offset[request]
        order = owner.rank_of(position) * padded_start[-1] + row

        request = torch.repeat_interleave(range_rows, output_size=padded_start[-1])
        index = torch.arange(padded_start[-1], device=self.device) + row_offset[request]
        position = owner.global_position(index)
        tokens = torch.where(position < range_end[request], position - token_offset[request], -1)
        # A padding row reads a slot of the block of its request's last token in the chunk; `order` never points to it.
        block = table[request, index // self.rows_per_block].to(torch.int64)
        slots = block * self.rows_per_block + index % self.rows_per_block
        return ContextChunk(slots, order, tokens, segments_of(lens, self.device), first_position)


def max_chunk_tokens(max_model_len: int, max_num_seqs: int, alignment: int) -> int:
    """Return the `DCPConfig.context_workspace_tokens` that engines set: the maximum tokens of a context chunk.

    It is the larger of 8 x max_model_len and 4 x max_num_seqs x alignment, at most 65,536, but never less than
    max_num_seqs x alignment.

    Args:
        alignment: Divisor of the positions where chunks begin (`DCPConfig.chunk_alignment`).
    Source: vLLM's chunked-prefill workspace for MLA.
    """
    return max(min(max(8 * max_model_len, 4 * max_num_seqs * alignment), 65536), max_num_seqs * alignment)


def chunk_bounds(context_lens: np.ndarray, max_tokens: int, alignment: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield for each chunk the positions [begin, end) of each request's context, two arrays [num_prefills].

    The remaining contexts share a chunk equally; long ones get the space that short ones do not need.

    Args:
        max_tokens: Maximum tokens of a chunk, at least alignment.
        alignment: Divisor of each begin.
    """
    room = max_tokens // alignment
    begin = np.zeros_like(context_lens)
    while (begin < context_lens).any():
        shares = _share(-(-(context_lens - begin) // alignment), room)
        end = np.minimum(context_lens, begin + shares * alignment)
        yield begin, end
        begin = end


def _share(needs: np.ndarray, room: int) -> np.ndarray:
    """Divide room among N needs, integers [N], equally, but give none more than it needs."""
    shares = np.zeros_like(needs)
    while room and (is_open := shares < needs).any():
        added = np.minimum(needs - shares, max(1, room // int(is_open.sum())))
        added[np.cumsum(added) > room] = 0  # too little room for one each: the first needs get it
        shares += added
        room -= int(added.sum())
    return shares


def segments_of(lens: Sequence[int] | np.ndarray, device: torch.device | str) -> Segments:
    """Return consecutive segments of the given lengths."""
    start = starts_of(lens)
    return Segments(start, upload([np.asarray(start, dtype=np.int32)], device)[0])


def starts_of(lens: Sequence[int] | np.ndarray) -> tuple[int, ...]:
    """Return the first row of each of consecutive segments with the given lengths, then the end of the last."""
    return (0, *np.cumsum(lens).tolist())


def cut_queries(lens: np.ndarray, max_query_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut requests of one token or more into segments of max_query_len tokens; a request's last may be shorter.

    Returns:
        The length of each segment, and its request, int32.
    """
    num_segments = -(-lens // max_query_len)
    request = np.repeat(np.arange(len(lens), dtype=np.int32), num_segments)
    segment_lens = np.full(len(request), max_query_len)
    segment_lens[np.cumsum(num_segments) - 1] = lens - (num_segments - 1) * max_query_len
    return segment_lens, request


def positions_of(query_lens: Sequence[int], seq_lens: Sequence[int]) -> np.ndarray:
    """Return the positions [T] int64 of all requests' new tokens."""
    if max(query_lens) == 1:
        return np.asarray(seq_lens, dtype=np.int64) - 1
    offsets = np.subtract(seq_lens, np.cumsum(query_lens))  # position of a token minus its number in the batch
    return np.arange(sum(query_lens)) + np.repeat(offsets, query_lens)


def pad_table(block_tables: Sequence[Sequence[int]], seq_lens: Sequence[int], block_tokens: int) -> np.ndarray:
    """Return [num_reqs, max_blocks] int64: the block ids of each request, then zeros, which nothing reads.

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
