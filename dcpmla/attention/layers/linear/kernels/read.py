"""Triton kernels that read the tokens and states of long pieces, for flash-linear-attention's kernels."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dcpmla.attention.layers.linear.calls import NORM_EPS, DeltaPieces, DeltaTokens
from dcpmla.attention.layers.linear.kernels.rows import ROWS, find, square_of


def read_tokens(tokens: DeltaTokens, conv: Tensor, recent: Tensor, pieces: DeltaPieces) -> tuple[Tensor, ...]:
    """Return the rows of pieces: convolved queries and keys of length 1, values and logits of decays [1, T, h, D], and
    rates of replacement [1, T, h], float32. Rows past the last piece are undefined.

    Args:
        conv: Weights of the convolution [3 h D, conv_size].
        recent: Latest inputs of the convolution (`DeltaState.recent`).
    """
    num_rows, num_heads = tokens.beta.shape
    dim, num_pieces = tokens.decay.shape[1] // num_heads, len(pieces.state)
    q, k, v, decay = (tokens.qkv.new_empty(1, num_rows, num_heads, dim) for _ in range(4))
    beta = tokens.beta.new_empty(1, num_rows, num_heads, dtype=torch.float32)
    _read_tokens[triton.cdiv(num_rows, ROWS), num_heads](
        q,
        k,
        v,
        decay,
        beta,
        *tokens[:3],
        conv,
        recent,
        *pieces[:4],
        num_pieces,
        *(column.stride(0) for column in tokens[:3]),
        HEADS=num_heads,
        DIM=dim,
        WIDTH=triton.next_power_of_2(dim),
        CONV=conv.shape[1],
        NUM_RECENT=recent.shape[1],
        PIECES=triton.next_power_of_2(num_pieces),
        ROWS=ROWS,
        NORM_EPS=NORM_EPS,
    )
    return q, k, v, decay, beta


def read_memory(memory: Tensor, pieces: DeltaPieces) -> Tensor:
    """Return the memory before each piece [num_pieces, h, D, D], float32: zero for a fresh request and for padding."""
    _, num_copies, num_heads, dim, _ = memory.shape
    before = memory.new_empty(len(pieces.state), num_heads, dim, dim)
    _read_memory[len(before), num_heads](
        before,
        memory,
        pieces.first_position,
        pieces.state,
        HEADS=num_heads,
        DIM=dim,
        WIDTH=triton.next_power_of_2(dim),
        NUM_COPIES=num_copies,
        num_warps=8,
    )
    return before


@triton.jit(do_not_specialize=["num_pieces"])
def _read_tokens(
    q,
    k,
    v,
    decay_out,
    beta_out,
    qkv,
    decay,
    beta,
    conv,
    recent,
    start_loc,
    token,
    first_position,
    state,
    num_pieces,
    qkv_stride,
    decay_stride,
    beta_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    CONV: tl.constexpr,
    NUM_RECENT: tl.constexpr,
    PIECES: tl.constexpr,
    ROWS: tl.constexpr,
    NORM_EPS: tl.constexpr,
):
    """Read one head's columns of some rows."""
    row, head = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    num_rows = tl.load(start_loc + num_pieces)
    if tl.program_id(0) * ROWS >= num_rows:
        return
    piece, index = find(row, start_loc, num_pieces, PIECES)
    columns = tl.arange(0, WIDTH)
    in_row, in_head = row < num_rows, columns < DIM
    is_there = in_row[:, None] & in_head[None, :]
    source = (tl.load(token + piece) + index).to(tl.int64)
    number, first = tl.load(state + piece).to(tl.int64), tl.load(first_position + piece)
    own = head * DIM + columns
    to = (row * HEADS + head)[:, None].to(tl.int64) * DIM + columns[None, :]
    for part in tl.static_range(3):
        at = part * HEADS * DIM + own
        total = tl.zeros([ROWS, WIDTH], tl.float32)
        for tap in tl.static_range(CONV):
            back = CONV - 1 - tap
            is_new, position = index >= back, first + index - back
            new = tl.load(
                qkv + (source - back)[:, None] * qkv_stride + at[None, :], is_there & is_new[:, None], 0.0
            ).to(tl.float32)
            slot = number * NUM_RECENT + (position + NUM_RECENT) % NUM_RECENT
            is_old = (index < back) & (position >= 0) & (number >= 0)
            old = tl.load(recent + slot[:, None] * 3 * HEADS * DIM + at[None, :], is_there & is_old[:, None], 0.0).to(
                tl.float32
            )
            total += (new + old) * tl.load(conv + at * CONV + tap, in_head, 0.0).to(tl.float32)[None, :]
        convolved = (total * tl.sigmoid(total)).to(qkv.dtype.element_ty)
        if part == 2:
            tl.store(v + to, convolved, is_there)
        else:
            x = convolved.to(tl.float32)
            x = (x * tl.rsqrt(tl.sum(x * x, 1) + NORM_EPS)[:, None]).to(qkv.dtype.element_ty)
            tl.store((q if part == 0 else k) + to, x, is_there)
    tl.store(decay_out + to, tl.load(decay + source[:, None] * decay_stride + own[None, :], is_there), is_there)
    rate = tl.sigmoid(tl.load(beta + source * beta_stride + head, in_row).to(tl.float32))
    tl.store(beta_out + row * HEADS + head, rate, in_row)


@triton.jit
def _read_memory(
    before,
    memory,
    first_position,
    state,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_COPIES: tl.constexpr,
):
    """Read one head's memory before one piece."""
    piece, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    number, first = tl.load(state + piece).to(tl.int64), tl.load(first_position + piece)
    square, in_square = square_of(DIM, WIDTH)
    copy = (tl.maximum(number, 0) * NUM_COPIES + (first + NUM_COPIES - 1) % NUM_COPIES) * HEADS + head
    value = tl.load(memory + copy * DIM * DIM + square, in_square, 0.0)
    value = tl.where(number >= 0, tl.where(first > 0, value, 0.0), 0.0)  # a fresh request's memory is of another one
    tl.store(before + (piece * HEADS + head) * DIM * DIM + square, value, in_square)
