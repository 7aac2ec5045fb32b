"""Hyper-connections as two Triton kernels; `dcpmla.model.streams` is their reference.

The first mixes a part's output into the streams and multiplies them by the next connection's weights, in parts of the
columns, so that a few tokens keep many SMs busy. The second sums the parts and makes the next part's input.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dcpmla.model.streams import Constants, Mixing, Projection, Streams

_ROWS, _COLUMNS = 16, 64  # of a tile of the first kernel: tokens, and columns of each stream
_PROGRAMS = 512  # of the first kernel, about: more tokens make each take more tiles


@triton.jit(do_not_specialize=["num_tokens", "num_steps"])
def mix_kernel(
    values_ptr,
    out_ptr,
    post_ptr,
    comb_ptr,
    mixed_ptr,
    fn_ptr,
    products_ptr,
    squares_ptr,
    num_tokens,
    num_steps,
    WIDTH: tl.constexpr,
    STREAMS: tl.constexpr,
    NUM: tl.constexpr,
    NUM_P: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Mix some columns of some tokens' streams, and multiply them by weights; a program takes num_steps tiles.

    values_ptr, mixed_ptr: [T, STREAMS, WIDTH]; out_ptr: [T, WIDTH], None where there is nothing to mix.
    fn_ptr: [NUM, STREAMS, WIDTH]; None where only streams are wanted.
    products_ptr: [T, parts, NUM_P] float32, of this program's columns; squares_ptr: [T, parts], their squares' sums.
    """
    part, num_parts = tl.program_id(0), tl.num_programs(0)
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    number, is_row = tl.arange(0, NUM_P), row < num_tokens
    products = tl.zeros([ROWS, NUM_P], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for step in range(num_steps):
        column = (part * num_steps + step) * COLUMNS + tl.arange(0, COLUMNS)
        is_column = column < WIDTH
        mask = is_row[:, None] & is_column[None, :]
        if out_ptr is not None:
            out = tl.load(out_ptr + row[:, None] * WIDTH + column[None, :], mask=mask, other=0.0).to(tl.float32)
        for stream in tl.static_range(STREAMS):
            at = (row * STREAMS + stream)[:, None] * WIDTH + column[None, :]
            if out_ptr is None:
                y = tl.load(values_ptr + at, mask=mask, other=0.0)
            else:
                y = tl.load(post_ptr + row * STREAMS + stream, mask=is_row, other=0.0)[:, None] * out
                for j in tl.static_range(STREAMS):
                    x_at = (row * STREAMS + j)[:, None] * WIDTH + column[None, :]
                    x = tl.load(values_ptr + x_at, mask=mask, other=0.0).to(tl.float32)
                    comb = tl.load(comb_ptr + (row * STREAMS + j) * STREAMS + stream, mask=is_row, other=0.0)
                    y += comb[:, None] * x
                y = y.to(mixed_ptr.dtype.element_ty)
                tl.store(mixed_ptr + at, y, mask=mask)
            if fn_ptr is not None:
                fn_at = (number * STREAMS + stream)[:, None] * WIDTH + column[None, :]
                fn = tl.load(fn_ptr + fn_at, mask=(number < NUM)[:, None] & is_column[None, :], other=0.0)
                y = y.to(tl.float32)
                products = tl.dot(y, fn.T, products, input_precision="tf32x3")
                squares += tl.sum(y * y, 1)
    if fn_ptr is not None:
        first = row * num_parts + part
        tl.store(products_ptr + first[:, None] * NUM_P + number[None, :], products, mask=is_row[:, None])
        tl.store(squares_ptr + first, squares, mask=is_row)


@triton.jit(do_not_specialize=["num_parts"])
def weigh_kernel(
    values_ptr,
    products_ptr,
    squares_ptr,
    base_ptr,
    scale_ptr,
    norm_ptr,
    x_ptr,
    post_ptr,
    comb_ptr,
    num_parts,
    eps,
    stream_eps,
    WIDTH: tl.constexpr,
    WIDTH_P: tl.constexpr,
    STREAMS: tl.constexpr,
    STREAMS_P: tl.constexpr,
    NUM_P: tl.constexpr,
    PARTS_P: tl.constexpr,
    NUM_ITERS: tl.constexpr,
):
    """Make a token's next input of its streams, and the weights of what comes of it; one program a token.

    products_ptr, squares_ptr: as `mix_kernel` writes them.
    x_ptr: [T, WIDTH]. post_ptr: [T, STREAMS], comb_ptr: [T, STREAMS, STREAMS]; None before the head.
    """
    token = tl.program_id(0).to(tl.int64)
    parts, stream = tl.arange(0, PARTS_P), tl.arange(0, STREAMS_P)
    is_part, is_stream = parts < num_parts, stream < STREAMS
    squares = tl.sum(tl.load(squares_ptr + token * num_parts + parts, mask=is_part, other=0.0))
    factor = tl.rsqrt(squares / (STREAMS * WIDTH) + eps)
    at = products_ptr + (token * num_parts + parts)[:, None] * NUM_P
    in_parts = is_part[:, None] & is_stream[None, :]
    numbers = tl.sum(tl.load(at + stream[None, :], mask=in_parts, other=0.0), 0) * factor
    numbers = numbers * tl.load(scale_ptr) + tl.load(base_ptr + stream, mask=is_stream, other=0.0)
    pre = tl.where(is_stream, tl.sigmoid(numbers) + stream_eps, 0.0)
    if post_ptr is not None:
        numbers = tl.sum(tl.load(at + STREAMS + stream[None, :], mask=in_parts, other=0.0), 0) * factor
        numbers = numbers * tl.load(scale_ptr + 1) + tl.load(base_ptr + STREAMS + stream, mask=is_stream, other=0.0)
        tl.store(post_ptr + token * STREAMS + stream, 2 * tl.sigmoid(numbers), mask=is_stream)
        cell = stream[:, None] * STREAMS + stream[None, :]
        is_cell = is_stream[:, None] & is_stream[None, :]
        in_parts = is_part[:, None, None] & is_cell[None, :, :]
        at = products_ptr + (token * num_parts + parts)[:, None, None] * NUM_P + 2 * STREAMS + cell[None, :, :]
        numbers = tl.sum(tl.load(at, mask=in_parts, other=0.0), 0) * factor
        base = tl.load(base_ptr + 2 * STREAMS + cell, mask=is_cell, other=0.0)
        numbers = tl.where(is_cell, numbers * tl.load(scale_ptr + 2) + base, -1e30)
        numbers = tl.exp(numbers - tl.max(numbers, 1)[:, None])
        comb = tl.where(is_cell, numbers / tl.sum(tl.where(is_cell, numbers, 0.0), 1)[:, None] + stream_eps, 0.0)
        comb = tl.where(is_cell, comb / (tl.sum(comb, 0)[None, :] + stream_eps), 0.0)
        for _ in range(NUM_ITERS - 1):
            comb = tl.where(is_cell, comb / (tl.sum(comb, 1)[:, None] + stream_eps), 0.0)
            comb = tl.where(is_cell, comb / (tl.sum(comb, 0)[None, :] + stream_eps), 0.0)
        tl.store(comb_ptr + token * STREAMS * STREAMS + cell, comb, mask=is_cell)
    column = tl.arange(0, WIDTH_P)
    is_column = column < WIDTH
    row = tl.zeros([WIDTH_P], tl.float32)
    for j in tl.static_range(STREAMS):
        weight = tl.sum(tl.where(stream == j, pre, 0.0))
        value = tl.load(values_ptr + (token * STREAMS + j) * WIDTH + column, mask=is_column, other=0.0)
        row += weight * value.to(tl.float32)
    row = row.to(x_ptr.dtype.element_ty).to(tl.float32)
    row *= tl.rsqrt(tl.sum(row * row) / WIDTH + eps)
    row *= tl.load(norm_ptr + column, mask=is_column, other=0.0)
    tl.store(x_ptr + token * WIDTH + column, row.to(x_ptr.dtype.element_ty), mask=is_column)


def enter(streams: Streams, projection: Projection, norm: Tensor, constants: Constants) -> tuple[Tensor, Streams]:
    """Compute `model.streams.enter`."""
    values, products, squares = _mix(streams, projection.fn)
    (num_tokens, num_streams, width), num_parts = values.shape, squares.shape[1]
    has_post = len(projection.fn) > num_streams
    mixing = None
    if has_post:
        mixing = Mixing(*(squares.new_empty(num_tokens, *[num_streams] * dims) for dims in (1, 2)))
    x = values.new_empty(num_tokens, width)
    if num_tokens:
        weigh_kernel[(num_tokens,)](
            values,
            products,
            squares,
            projection.base,
            projection.scale,
            norm,
            x,
            *(mixing or (None, None)),
            num_parts,
            constants.eps,
            constants.stream_eps,
            WIDTH=width,
            WIDTH_P=triton.next_power_of_2(width),
            STREAMS=num_streams,
            STREAMS_P=triton.next_power_of_2(num_streams),
            NUM_P=products.shape[2],
            PARTS_P=triton.next_power_of_2(triton.cdiv(width, _COLUMNS)),
            NUM_ITERS=constants.num_iters,
            num_warps=8,
        )
    return x, Streams(values, mixing)


def mix(streams: Streams) -> Tensor:
    """Compute `model.streams.mix`."""
    return _mix(streams, None)[0]


def _mix(streams: Streams, fn: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the streams with everything mixed in, and what `mix_kernel` makes of them with weights."""
    values, mixing, out = streams
    values = values.contiguous()
    num_tokens, num_streams, width = values.shape
    mixed = values if mixing is None else torch.empty_like(values)
    num_tiles, num_rows = triton.cdiv(width, _COLUMNS), triton.cdiv(num_tokens, _ROWS)
    num_steps = min(num_tiles, max(1, num_tiles * num_rows // _PROGRAMS))
    num_parts = triton.cdiv(num_tiles, num_steps)
    num = 0 if fn is None else len(fn)
    num_padded = max(16, triton.next_power_of_2(num))
    products = values.new_empty(0 if fn is None else num_tokens, num_parts, num_padded, dtype=torch.float32)
    squares = products.new_empty(products.shape[:2])
    if num_tokens and not (fn is None and mixing is None):
        mix_kernel[(num_parts, num_rows)](
            values,
            out if out is None else out.contiguous(),
            *(mixing or (None, None)),
            mixed,
            fn,
            products,
            squares,
            num_tokens,
            num_steps,
            WIDTH=width,
            STREAMS=num_streams,
            NUM=num,
            NUM_P=num_padded,
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            num_warps=4,
        )
    return mixed, products, squares
