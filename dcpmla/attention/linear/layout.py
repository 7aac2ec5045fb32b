"""The numbers of a step that layers of linear attention read, packed for one transfer (`DeltaLayout`)."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from dcpmla.attention.linear.calls import CHUNK, DeltaPieces, DeltaRequests
from dcpmla.attention.step import StepRequests

# Tokens from which a request attends in chunks. On an H200, 32 heads take 80 us a layer for up to 128 tokens in chunks,
# and 3.6 us a token in the recurrence.
LONG_PIECE = 32
# Most requests that attend in chunks, and tokens of a step for each. Kernels read and write 4 MB of memory for each one
# that may (32 heads), so in steps of many short prompts the shortest go through the recurrence.
MAX_PIECES, TOKENS_PER_PIECE = 32, 64


@dataclass(frozen=True)
class DeltaMetadata:
    """The requests of a step for layers of linear attention; decodes and prefills alike.

    Attributes:
        requests: Rows, positions and states of all requests.
        recurrent: The same, but requests that attend in chunks are padding.
        pieces: Requests that attend in chunks; None where none may.
    """

    requests: DeltaRequests
    recurrent: DeltaRequests
    pieces: DeltaPieces | None = None

    def of_tokens(self, index: int, size: int) -> "DeltaMetadata":
        """Raise NotImplementedError: no MTP module has linear attention."""
        raise NotImplementedError("a token of a step has no state of its own")


class DeltaLayout(NamedTuple):
    """Sizes of a step's numbers for linear attention.

    Attributes:
        num_reqs, num_tokens: Number of requests and of tokens, padding among them.
        num_pieces: Number of requests that may attend in chunks, padding among them.
    """

    num_reqs: int
    num_tokens: int
    num_pieces: int

    @classmethod
    def of_step(cls, num_reqs: int, num_tokens: int, takes_chunks: bool) -> "DeltaLayout":
        """Return the sizes for a step.

        Args:
            takes_chunks: Whether long pieces attend in chunks.
        """
        has_pieces = takes_chunks and num_tokens >= LONG_PIECE
        num_pieces = min(num_reqs, MAX_PIECES, max(1, num_tokens // TOKENS_PER_PIECE))
        return cls(num_reqs, num_tokens, num_pieces if has_pieces else 0)

    @property
    def size(self) -> int:
        """Return the length of the packed array."""
        return sum(_aligned(length) for length, _ in self._columns)

    def pack(self, requests: StepRequests) -> np.ndarray:
        """Return the numbers [size] of a step, int32. A request of state -1 is padding.

        Raises:
            ValueError: The step has more requests or tokens than the layout.
        """
        new_and_end = requests.query_lens, requests.seq_lens, requests.states
        query_lens, seq_lens, states = (np.array(column, dtype=np.int32) for column in new_and_end)
        if len(query_lens) > self.num_reqs or query_lens.sum() > self.num_tokens:
            raise ValueError(
                f"query_lens has {len(query_lens)} requests with {query_lens.sum()} tokens; at most {self.num_reqs} "
                f"requests and {self.num_tokens} tokens are allowed"
            )
        start, first = np.cumsum(query_lens) - query_lens, seq_lens - query_lens
        by_length = np.argsort(-query_lens, kind="stable")[: self.num_pieces]
        pieces = np.sort(by_length[query_lens[by_length] >= LONG_PIECE])
        columns = [start, first, seq_lens, states]
        if self.num_pieces:
            recurrent = states.copy()
            recurrent[pieces] = -1
            lens, num_chunks = query_lens[pieces], -(-query_lens[pieces] // CHUNK)
            piece = np.repeat(np.arange(len(pieces)), num_chunks)
            chunk = np.arange(len(piece)) - (np.cumsum(num_chunks) - num_chunks)[piece]
            columns += [recurrent, np.cumsum([0, *lens]), start[pieces], first[pieces], states[pieces]]
            columns += [np.stack([piece, chunk], 1).ravel(), np.cumsum([0, *num_chunks])]
        numbers, begin = np.zeros(self.size, dtype=np.int32), 0
        for column, (length, padding) in zip(columns, self._columns, strict=True):
            numbers[begin : begin + len(column)] = column
            numbers[begin + len(column) : begin + length] = column[-1] if padding is None else padding
            begin += _aligned(length)
        return numbers

    def unpack(self, numbers: Tensor) -> DeltaMetadata:
        """Return the metadata of a step, parts of its packed numbers [size or more], int32."""
        parts, begin = [], 0
        for length, _ in self._columns:
            parts.append(numbers[begin : begin + length])
            begin += _aligned(length)
        requests = DeltaRequests(*parts[:4])
        if not self.num_pieces:
            return DeltaMetadata(requests, requests)
        recurrent, start_loc, token, first, state, chunks, chunk_starts = parts[4:]
        pieces = DeltaPieces(start_loc, token, first, state, chunks.view(-1, 2), chunk_starts)
        return DeltaMetadata(requests, requests._replace(state=recurrent), pieces)

    @property
    def _columns(self) -> list[tuple[int, int | None]]:
        """Return the length of each column, and what fills it up: a number, or None for its last one."""
        num_pieces = self.num_pieces
        columns: list[tuple[int, int | None]] = [(self.num_reqs, 0) for _ in range(3)]
        columns.append((self.num_reqs, -1))
        if num_pieces:
            num_chunks = self.num_tokens // CHUNK + num_pieces  # each piece has at most one chunk that is not full
            columns += [(self.num_reqs, -1), (num_pieces + 1, None), (num_pieces, 0), (num_pieces, 0), (num_pieces, -1)]
            columns += [(2 * num_chunks, -1), (num_pieces + 1, None)]
        return columns


def _aligned(length: int) -> int:
    """Return a number of elements rounded up to 16 bytes, at which kernels expect tensors to begin."""
    return -(-length // 4) * 4
