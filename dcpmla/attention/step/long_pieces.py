"""The numbers of long pieces in a step's table: linear attention computes them in chunks of tokens (`PieceSizes`)."""

from typing import Any, NamedTuple

import numpy as np

from dcpmla.upload import aligned_slices

CHUNK = 64  # tokens of a chunk
# Tokens from which a request attends in chunks. On an H200, 32 heads take 80 us a layer for up to 128 tokens in chunks,
# and 3.6 us a token in the recurrence.
LONG_PIECE = 32
# Most requests that attend in chunks, and tokens of a step for each. Kernels read and write 4 MB of memory for each one
# that may (32 heads), so in steps of many short prompts the shortest go through the recurrence.
MAX_PIECES, TOKENS_PER_PIECE = 32, 64
_PADDING = -1, None, 0, 0, -1, -1, None  # of each column; None repeats its last number


class PieceSizes(NamedTuple):
    """The sizes of the numbers of a step's long pieces.

    Attributes:
        num_reqs, num_tokens: Number of requests and of tokens of the step, padding among them.
    """

    num_reqs: int
    num_tokens: int

    @property
    def num_pieces(self) -> int:
        """Return how many requests may attend in chunks, padding among them."""
        most = min(self.num_reqs, MAX_PIECES, max(1, self.num_tokens // TOKENS_PER_PIECE))
        return most if self.num_tokens >= LONG_PIECE else 0

    @property
    def columns(self) -> list[slice]:
        """Return the words of each column; all columns are empty if no request may attend in chunks."""
        num = self.num_pieces
        num_chunks = self.num_tokens // CHUNK + num  # each piece has at most one chunk that is not full
        lengths = self.num_reqs, num + 1, num, num, num, 2 * num_chunks, num + 1
        return aligned_slices(lengths if num else (0,) * 7, 4)

    def fill(self, words: np.ndarray, lens: np.ndarray, first: np.ndarray, states: np.ndarray, starts: Any) -> None:
        """Write the numbers of a step.

        Args:
            lens, first, states: New tokens of each request, the position of the first one, and its state [num_reqs].
            starts: First row of each request, and the end [num_reqs + 1].
        """
        by_length = np.argsort(-lens, kind="stable")[: self.num_pieces]
        pieces = np.sort(by_length[lens[by_length] >= LONG_PIECE])
        recurrent = states.copy()
        recurrent[pieces] = -1
        num_chunks = -(-lens[pieces] // CHUNK)
        piece = np.repeat(np.arange(len(pieces)), num_chunks)
        chunk = np.arange(len(piece)) - (np.cumsum(num_chunks) - num_chunks)[piece]
        columns = (
            recurrent,
            np.cumsum([0, *lens[pieces]]),
            starts[:-1][pieces],
            first[pieces],
            states[pieces],
            np.stack([piece, chunk], 1).ravel(),
            np.cumsum([0, *num_chunks]),
        )
        for target, column, padding in zip(self.split(words), columns, _PADDING, strict=True):
            target[: len(column)] = column
            target[len(column) :] = column[-1] if padding is None else padding

    def split(self, words: Any) -> list[Any]:
        """Return the columns of the numbers: the states of requests in the recurrence, -1 for long pieces, then the
        columns of `linear.calls.DeltaPieces`.
        """
        return [words[column] for column in self.columns]
