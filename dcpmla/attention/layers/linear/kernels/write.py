"""Triton kernels that write what flash-linear-attention's return for long pieces: outputs and states."""

import triton
import triton.language as tl
from torch import Tensor

from dcpmla.attention.layers.linear.calls import DeltaPieces, DeltaState
from dcpmla.attention.layers.linear.kernels.rows import ROWS, find, square_of


def write_state(state: DeltaState, memory_after: Tensor, qkv: Tensor, pieces: DeltaPieces) -> None:
    """Write the pieces' last inputs of the convolution, and the memory after each piece, to their states.

    Args:
        memory_after: Memory after each piece [num_pieces, h, D, D], float32.
        qkv: Queries, keys and values of the step's tokens before the convolution (`DeltaTokens.qkv`).
    """
    num_pieces, num_heads, dim, _ = memory_after.shape
    _write_state[num_pieces, num_heads](
        *state,
        memory_after,
        qkv,
        *pieces[:4],
        qkv.stride(0),
        HEADS=num_heads,
        DIM=dim,
        WIDTH=triton.next_power_of_2(dim),
        NUM_RECENT=state.recent.shape[1],
        NUM_COPIES=state.memory.shape[1],
        num_warps=8,
    )


def write_outputs(out: Tensor, attended: Tensor, gate: Tensor, norm: Tensor, pieces: DeltaPieces, eps: float) -> None:
    """Write norm(attended) sigmoid(gate) to the pieces' tokens.

    Args:
        out: Output [T, h D] of the step's tokens.
        attended: Output of attention for the rows of pieces [1, T, h, D].
        gate: Logits of the gates of the step's tokens [T, h D].
        norm: Weight of the norm [D].
    """
    _, num_rows, num_heads, dim = attended.shape
    num_pieces = len(pieces.state)
    _write_outputs[triton.cdiv(num_rows, ROWS), num_heads](
        out,
        attended,
        gate,
        norm,
        pieces.start_loc,
        pieces.token,
        num_pieces,
        gate.stride(0),
        eps,
        HEADS=num_heads,
        DIM=dim,
        WIDTH=triton.next_power_of_2(dim),
        PIECES=triton.next_power_of_2(num_pieces),
        ROWS=ROWS,
    )


@triton.jit
def _write_state(
    recent,
    memory,
    memory_after,
    qkv,
    start_loc,
    token,
    first_position,
    state,
    qkv_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_RECENT: tl.constexpr,
    NUM_COPIES: tl.constexpr,
):
    """Write one head's part of the state after one piece."""
    piece, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    number = tl.load(state + piece).to(tl.int64)
    if number < 0:
        return
    num_tokens = tl.load(start_loc + piece + 1) - tl.load(start_loc + piece)
    first, end = tl.load(token + piece).to(tl.int64), tl.load(first_position + piece) + num_tokens
    square, in_square = square_of(DIM, WIDTH)
    value = tl.load(memory_after + (piece * HEADS + head) * DIM * DIM + square, in_square)
    copy = (number * NUM_COPIES + (end - 1) % NUM_COPIES) * HEADS + head
    tl.store(memory + copy * DIM * DIM + square, value, in_square)
    columns = tl.arange(0, WIDTH)
    for back in tl.static_range(1, NUM_RECENT + 1):
        if back <= num_tokens:
            slot = number * NUM_RECENT + (end - back + NUM_RECENT) % NUM_RECENT
            for part in tl.static_range(3):
                at = (part * HEADS + head) * DIM + columns
                inputs = tl.load(qkv + (first + num_tokens - back) * qkv_stride + at, columns < DIM)
                tl.store(recent + slot * 3 * HEADS * DIM + at, inputs, columns < DIM)


@triton.jit(do_not_specialize=["num_pieces"])
def _write_outputs(
    out,
    attended,
    gate,
    norm,
    start_loc,
    token,
    num_pieces,
    gate_stride,
    eps,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Norm, gate and write one head's columns of some rows."""
    row, head = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    num_rows = tl.load(start_loc + num_pieces)
    if tl.program_id(0) * ROWS >= num_rows:
        return
    piece, index = find(row, start_loc, num_pieces, PIECES)
    columns = tl.arange(0, WIDTH)
    is_there = (row < num_rows)[:, None] & (columns < DIM)[None, :]
    target = (tl.load(token + piece) + index).to(tl.int64)[:, None]
    own = head * DIM + columns[None, :]
    x = tl.load(attended + row[:, None].to(tl.int64) * HEADS * DIM + own, is_there, 0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None] * tl.load(norm + columns, columns < DIM, 0.0)[None, :]
    x *= tl.sigmoid(tl.load(gate + target * gate_stride + own, is_there, 0.0).to(tl.float32))
    tl.store(out + target * HEADS * DIM + own, x, is_there)
