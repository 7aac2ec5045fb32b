"""Steps whose first pieces attend with absorbed queries, padded to a fixed number of tokens (`piece_columns`)."""

from typing import Any, NamedTuple

import numpy as np

from dcpmla.attention.build import StepBuilder
from dcpmla.attention.chunks import cut_queries, starts_of
from dcpmla.attention.step import StepRequests


class PieceColumns(NamedTuple):
    """The numbers of a step, padded with tokens that attend to nothing. Absorbed pieces are among its first N tokens.

    Attributes:
        positions, slot_mapping: Position and slot of each token [T], int64; 0 and -1 in padding.
        local_seq_lens, seq_lens: Number of tokens that each token of an absorbed piece sees on this rank, and on all
            [N], int32; 0 for others.
        request: Request of each token of an absorbed piece [N], int32; 0 for others.
        start_loc: First token of each segment, and the end [num_segments + 1], int32.
        request_index: Request of each segment [num_segments], int32.
        block_table: Block ids of each request [num_reqs, max_blocks], int32.
    """

    positions: Any
    slot_mapping: Any
    local_seq_lens: Any
    seq_lens: Any
    request: Any
    start_loc: Any
    request_index: Any
    block_table: Any


def piece_columns(
    steps: StepBuilder,
    requests: StepRequests,
    num_absorbed: int,
    max_query_len: int,
    num_tokens: int,
    room: int,
    num_segments: int,
) -> PieceColumns:
    """Return the numbers of a step, padded to a fixed number of tokens.

    Args:
        steps: Builder of the step.
        requests: Requests of the step.
        num_absorbed: Number of requests that attend with absorbed queries, the first ones.
        max_query_len: Most tokens of a segment; longer requests are cut.
        num_tokens, num_segments: Number of tokens and of segments after padding.
        room: N, the most tokens of absorbed pieces.
    Raises:
        ValueError: The requests are invalid (`check`), or have more tokens.
    """
    steps.check(requests)
    lens = np.asarray(requests.query_lens[:num_absorbed], dtype=np.int64)
    host, num_seen = steps.on_host(requests, max_query_len, num_absorbed), int(lens.sum())
    for num_given, limit in ((len(host.positions), num_tokens), (num_seen, room)):
        if num_given > limit:
            raise ValueError(f"query_lens has {num_given} tokens; at most {limit} are allowed")
    start_loc, request_index = cut_starts(lens, max_query_len, room, num_segments)

    def pad(values: np.ndarray, dtype: type, length: int, fill: int = 0) -> np.ndarray:
        column: np.ndarray = np.full(length, fill, dtype=dtype)
        column[: len(values)] = values
        return column

    seen = host.positions[:num_seen]
    return PieceColumns(
        positions=pad(host.positions, np.int64, num_tokens),
        slot_mapping=pad(steps.slots(host), np.int64, num_tokens, -1),
        local_seq_lens=pad(steps.local_seq_lens(seen), np.int32, room),
        seq_lens=pad(seen + 1, np.int32, room),
        request=pad(host.request[:num_seen], np.int32, room),
        start_loc=start_loc,
        request_index=request_index,
        block_table=host.table.astype(np.int32),
    )


def cut_starts(
    lens: np.ndarray, max_query_len: int, num_tokens: int, num_segments: int
) -> tuple[np.ndarray, np.ndarray]:
    """Cut requests, and the padding after them, into segments.

    Args:
        lens: Tokens of each request, at least 1.
        num_tokens, num_segments: Number of tokens and of segments after padding.
    Returns:
        The first token of each segment, and the end [num_segments + 1], int32; the request of each [num_segments],
        int32, 0 for padding.
    """
    padding = [num_tokens - int(lens.sum())] if lens.sum() < num_tokens else []
    segment_lens, index = cut_queries(np.append(lens, padding).astype(np.int64), max_query_len)
    start_loc = np.full(num_segments + 1, num_tokens, dtype=np.int32)
    start_loc[: len(segment_lens) + 1] = starts_of(segment_lens)
    request_index = np.zeros(num_segments, dtype=np.int32)
    request_index[: len(index)] = np.where(index < len(lens), index, 0)
    return start_loc, request_index
