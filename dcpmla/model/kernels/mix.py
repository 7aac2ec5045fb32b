"""The first kernel of a hyper-connection, for few tokens and for more; `streams` has the second.

It mixes a part's output into the streams and multiplies them by the next connection's weights, in parts of the columns,
so that a few tokens keep many SMs busy.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dcpmla.model.mixing import Streams

# Measured on H200s.
PART = tl.constexpr(64)  # columns of a program at least
_FEW_TOKENS = 16  # up to this many, each token has a program for every part
_ROWS, _COLUMNS = tl.constexpr(32), tl.constexpr(32)  # tile size for more tokens
_PROGRAMS = 512  # approximate number of programs for more tokens; each takes several tiles


@triton.jit
def mix_few_kernel(
    values_ptr,
    out_ptr,
    post_ptr,
    comb_ptr,
    mixed_ptr,
    fn_ptr,
    products_ptr,
    squares_ptr,
    WIDTH: tl.constexpr,
    STREAMS: tl.constexpr,
    NUM: tl.constexpr,
    NUM_P: tl.constexpr,
):
    """Mix some columns of a token's streams, and multiply them by weights; arguments as `mix_kernel`'s."""
    part, num_parts, token = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    column, number = part * PART + tl.arange(0, PART), tl.arange(0, NUM_P)
    is_column = column < WIDTH
    # All loads precede the first store because they would otherwise wait for it.
    values, weights = (), ()
    for stream in tl.static_range(STREAMS):
        at = (token * STREAMS + stream) * WIDTH + column
        values += (tl.load(values_ptr + at, mask=is_column, other=0.0),)
        if fn_ptr is not None:
            fn_at = (number * STREAMS + stream)[:, None] * WIDTH + column[None, :]
            weights += (tl.load(fn_ptr + fn_at, mask=(number < NUM)[:, None] & is_column[None, :], other=0.0),)
    post, comb = (), ()
    if out_ptr is not None:
        out = tl.load(out_ptr + token * WIDTH + column, mask=is_column, other=0.0).to(tl.float32)
        for stream in tl.static_range(STREAMS):
            post += (tl.load(post_ptr + token * STREAMS + stream),)
            if comb_ptr is not None:
                for j in tl.static_range(STREAMS):
                    comb += (tl.load(comb_ptr + (token * STREAMS + j) * STREAMS + stream),)
    products = tl.zeros([NUM_P, PART], tl.float32)
    squares = tl.zeros([PART], tl.float32)
    for stream in tl.static_range(STREAMS):
        y = values[stream]
        if out_ptr is not None:
            y = post[stream] * out
            if comb_ptr is None:
                y += values[stream].to(tl.float32)
            else:
                for j in tl.static_range(STREAMS):
                    y += comb[stream * STREAMS + j] * values[j].to(tl.float32)
            y = y.to(mixed_ptr.dtype.element_ty)
            tl.store(mixed_ptr + (token * STREAMS + stream) * WIDTH + column, y, mask=is_column)
        if fn_ptr is not None:
            y = y.to(tl.float32)
            products += y[None, :] * weights[stream]
            squares += y * y
    if fn_ptr is not None:
        first = token * num_parts + part
        tl.store(products_ptr + first * NUM_P + number, tl.sum(products, 1))
        tl.store(squares_ptr + first, tl.sum(squares))


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
):
    """Mix some columns of some tokens' streams, and multiply them by weights; a program takes num_steps tiles.

    values_ptr, mixed_ptr: [T, STREAMS, WIDTH]; out_ptr: [T, WIDTH], None without an output to mix.
    post_ptr: [T, STREAMS]; comb_ptr: [T, STREAMS, STREAMS], or None for the identity.
    fn_ptr: [NUM, STREAMS, WIDTH]; None to return streams alone.
    products_ptr: [T, parts, NUM_P] float32, products over a part's columns; squares_ptr: [T, parts], sums of squares.
    """
    part, num_parts = tl.program_id(0), tl.num_programs(0)
    row = (tl.program_id(1) * _ROWS + tl.arange(0, _ROWS)).to(tl.int64)
    number, is_row = tl.arange(0, NUM_P), row < num_tokens
    products = tl.zeros([_ROWS, NUM_P], tl.float32)
    squares = tl.zeros([_ROWS, _COLUMNS], tl.float32)
    for step in range(num_steps):
        column = (part * num_steps + step) * _COLUMNS + tl.arange(0, _COLUMNS)
        is_column = column < WIDTH
        mask = is_row[:, None] & is_column[None, :]
        values = ()
        for stream in tl.static_range(STREAMS):
            at = (row * STREAMS + stream)[:, None] * WIDTH + column[None, :]
            values += (tl.load(values_ptr + at, mask=mask, other=0.0),)
        if out_ptr is not None:
            out = tl.load(out_ptr + row[:, None] * WIDTH + column[None, :], mask=mask, other=0.0).to(tl.float32)
        for stream in tl.static_range(STREAMS):
            y = values[stream]
            if out_ptr is not None:
                y = tl.load(post_ptr + row * STREAMS + stream, mask=is_row, other=0.0)[:, None] * out
                if comb_ptr is None:
                    y += values[stream].to(tl.float32)
                else:
                    for j in tl.static_range(STREAMS):
                        comb = tl.load(comb_ptr + (row * STREAMS + j) * STREAMS + stream, mask=is_row, other=0.0)
                        y += comb[:, None] * values[j].to(tl.float32)
                y = y.to(mixed_ptr.dtype.element_ty)
                tl.store(mixed_ptr + (row * STREAMS + stream)[:, None] * WIDTH + column[None, :], y, mask=mask)
            if fn_ptr is not None:
                fn_at = (number * STREAMS + stream)[:, None] * WIDTH + column[None, :]
                fn = tl.load(fn_ptr + fn_at, mask=(number < NUM)[:, None] & is_column[None, :], other=0.0)
                y = y.to(tl.float32)
                products = tl.dot(y, fn.T, products, input_precision="tf32x3")
                squares += y * y
    if fn_ptr is not None:
        first = row * num_parts + part
        tl.store(products_ptr + first[:, None] * NUM_P + number[None, :], products, mask=is_row[:, None])
        tl.store(squares_ptr + first, tl.sum(squares, 1), mask=is_row)


def mix(streams: Streams) -> Tensor:
    """Compute `model.streams.mix`."""
    return mix_and_multiply(streams, None)[0]


def mix_and_multiply(streams: Streams, fn: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mixed streams, and the results of `mix_kernel` for them with weights fn."""
    values, mixing, out, _ = streams
    values = values.contiguous()
    num_tokens, num_streams, width = values.shape
    mixed = values if mixing is None else torch.empty_like(values)
    num = 0 if fn is None else len(fn)
    num_padded = max(16, triton.next_power_of_2(num))
    is_few = num_tokens <= _FEW_TOKENS
    num_parts, num_rows = triton.cdiv(width, PART.value), triton.cdiv(num_tokens, 1 if is_few else _ROWS.value)
    num_steps = 1 if is_few else PART.value // _COLUMNS.value * max(1, num_parts * num_rows // _PROGRAMS)
    num_parts = num_parts if is_few else triton.cdiv(width, num_steps * _COLUMNS.value)
    products = values.new_empty(0 if fn is None else num_tokens, num_parts, num_padded, dtype=torch.float32)
    squares = products.new_empty(products.shape[:2])
    tensors = values, out if out is None else out.contiguous(), *(mixing or (None, None)), mixed, fn, products, squares
    sizes = {"WIDTH": width, "STREAMS": num_streams, "NUM": num, "NUM_P": num_padded}
    if num_tokens == 0 or (fn is None and mixing is None):
        pass
    elif is_few:
        mix_few_kernel[(num_parts, num_rows)](*tensors, **sizes, num_warps=4)
    else:
        stages = 2 if num_streams <= 4 else 1  # more of more streams do not fit
        mix_kernel[(num_parts, num_rows)](*tensors, num_tokens, num_steps, **sizes, num_warps=4, num_stages=stages)
    return mixed, products, squares
