"""Requests of a step in flat arrays, and their cached contexts in chunks: the rows that each rank brings to a gather,
and the order of tokens in the gather's result.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dcpmla.attention.backends.calls import Segments
from dcpmla.attention.step.table import StepLayout, starts_of
from dcpmla.ownership import Owner
from dcpmla.upload import upload


@dataclass(frozen=True)
class ContextChunk:
    """A range of each prefill's cached context. Ranges may differ and be empty; together they have at most
    `context_workspace_tokens` tokens.

    Attributes:
        local_slots: Slots of this rank's cached tokens of the chunk [N], int64, request after request. Each request's
            slots are padded to the same number on all ranks.
        order: order[s] is the row of token s in the concatenation [W N] of all ranks' rows: s if W is 1. The S tokens
            are sorted by request, then by position. [S], int64.
        tokens: tokens[n] is the token in [0, S) that this rank's row n holds, -1 for padding [N], int64. Collectives
            reorder by `order` after the gather; `direct` stores each row at its token's row by `tokens`.
        keys: Rows of each request among the S tokens.
        first_position: Position of each request's first token in the chunk [num_prefills], int32; for a request
            without tokens in the chunk, the number of its tokens in the chunks before.
    """

    local_slots: Tensor
    order: Tensor
    tokens: Tensor
    keys: Segments
    first_position: Tensor


@dataclass(frozen=True)
class PrefillMetadata:
    """Requests that attend by MHA.

    Attributes:
        queries: Rows of each request among the prefill tokens. In a graph `start` is empty; `start_loc` then counts
            rows of the whole step, and the first request may begin after row 0.
        first_position: Position of each request's first new token [num_prefills], int32.
        context_chunks: Context that was cached before this step; empty when there is none. With dcp.deterministic
            chunks include the new tokens.
        window: Number of last tokens, its own included, among which a token selects; None where it selects among all.
        is_deterministic: Whether sums have a fixed order (dcp.deterministic).
    """

    queries: Segments
    first_position: Tensor
    context_chunks: tuple[ContextChunk, ...]
    window: int | None = None
    is_deterministic: bool = False


def context_chunks(
    layout: StepLayout, rows_per_block: int, begin: np.ndarray, end: np.ndarray, alignment: int, table: Tensor
) -> tuple[ContextChunk, ...]:
    """Cut positions [begin[i], end[i]) of each request into chunks of at most dcp.context_workspace_tokens
    (`chunk_bounds`), with the rows that this rank brings.

    Args:
        rows_per_block: Rows of a block on one rank.
        begin, end: Positions [num_reqs]. In a range that is not empty, begin must be a multiple of W I.
        table: Block ids of each request [num_reqs, max_blocks], integers on the device.
    """
    bounds = chunk_bounds(end - begin, layout.dcp.context_workspace_tokens, alignment)
    return tuple(_chunk(layout, rows_per_block, begin + first, begin + last, table) for first, last in bounds)


def _chunk(layout: StepLayout, rows_per_block: int, begin: np.ndarray, end: np.ndarray, table: Tensor) -> ContextChunk:
    """Return one chunk. Only numbers per request come from the host; numbers per token are computed on the device."""
    device = layout.device
    owner = layout.owner if layout.owner.size > 1 else Owner()  # one rank has all tokens in order
    size, interleave = owner.size, owner.interleave
    lens = end - begin
    # Rank 0 stores the first I tokens of each range, so it has the most. All ranks pad to rank 0's number, rounded
    # up to a multiple of I.
    padded_lens = -(-lens // (size * interleave)) * interleave
    start, padded_start = starts_of(lens), starts_of(padded_lens)
    # Offsets of each request: position = token in the chunk + first offset; local index = row + second offset.
    offsets = begin - start[:-1], begin // size - padded_start[:-1]
    per_request = np.stack([lens, padded_lens, end, *offsets])
    numbers, first_position, start_loc = upload(
        [per_request, begin.astype(np.int32), np.array(start, np.int32)], device
    )
    # The same numbers on the device, [num_reqs] each.
    range_tokens, range_rows, range_end, token_offset, row_offset = numbers

    request = torch.repeat_interleave(range_tokens, output_size=start[-1])
    position = torch.arange(start[-1], device=device) + token_offset[request]
    row = owner.local_index(position) - row_offset[request]
    order = owner.rank_of(position) * padded_start[-1] + row

    request = torch.repeat_interleave(range_rows, output_size=padded_start[-1])
    index = torch.arange(padded_start[-1], device=device) + row_offset[request]
    position = owner.global_position(index)
    tokens = torch.where(position < range_end[request], position - token_offset[request], -1)
    # A padding row reads a slot of the block of its request's last token in the chunk; `order` never points to it.
    block = table[request, index // rows_per_block].to(torch.int64)
    slots = block * rows_per_block + index % rows_per_block
    return ContextChunk(slots, order, tokens, Segments(start, start_loc), first_position)


def lay_out_prefills(
    layout: StepLayout,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    table: Tensor,
    columns: tuple[Tensor, Tensor] | None = None,
    window: int | None = None,
) -> PrefillMetadata:
    """Lay out prefills, without waiting for the device.

    Args:
        query_lens, seq_lens: New tokens of each request, and its tokens after this step, each [num_prefills].
        table: Block ids of each request [num_prefills, max_blocks], integers on the device, enough for seq_lens.
        columns: First row of each request among theirs, and the end [num_prefills + 1], and the position of its first
            new token [num_prefills], int32 on the device; None uploads them.
        window: Number of last tokens among which a token selects; contexts begin at the window of the first new token.
            None for whole contexts.
    """
    dcp, contexts = layout.dcp, np.subtract(seq_lens, query_lens)
    start, alignment = starts_of(query_lens), dcp.chunk_alignment
    if columns is None:
        start_loc, first_position = upload([np.array(each, np.int32) for each in (start, contexts)], layout.device)
    else:
        start_loc, first_position = columns
    first, end = np.zeros_like(contexts), contexts
    if window is not None:
        first = np.maximum(contexts - window + 1, 0) // alignment * alignment
    elif dcp.deterministic and contexts.any():
        end = np.asarray(seq_lens)  # In a fixed order keys are one sequence: new tokens are read after their context.
    chunks = context_chunks(layout, dcp.block_size, first, end, alignment, table)
    return PrefillMetadata(
        Segments(start, start_loc), first_position, chunks, window, is_deterministic=dcp.deterministic
    )


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
