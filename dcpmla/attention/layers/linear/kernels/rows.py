"""Places of a long piece's rows and of a head's memory, inside kernels."""

import triton
import triton.language as tl

ROWS = 16  # rows of a program


@triton.jit
def find(row, start_loc, num_pieces, PIECES: tl.constexpr):
    """Return the piece of each row, and the row's index in it. Rows past the last piece are in it, too."""
    number = tl.arange(0, PIECES)
    ends = tl.load(start_loc + 1 + number, number < num_pieces - 1, 1 << 30)
    piece = tl.sum((ends[None, :] <= row[:, None]).to(tl.int32), 1)
    return piece, row - tl.load(start_loc + piece)


@triton.jit
def square_of(DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Return the elements of a head's memory, and whether each exists."""
    columns = tl.arange(0, WIDTH)
    in_head = columns < DIM
    return columns[:, None] * DIM + columns[None, :], in_head[:, None] & in_head[None, :]
