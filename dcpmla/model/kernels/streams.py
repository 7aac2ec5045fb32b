"""Hyper-connections as two Triton kernels: this is the second, `mix` has the first; `dcpmla.model.streams` is their
reference.

The second sums what the first has multiplied, and makes the next part's input.
"""

import triton
import triton.language as tl
from torch import Tensor

from dcpmla.model.kernels.mix import PART, mix_and_multiply
from dcpmla.model.mixing import Constants, Mixing, Projection, Streams
from dcpmla.parallel.kernels.quantize import store_codes
from dcpmla.parallel.quantized import NormedRows, PlainRows, QuantizedRows, empty_groups


@triton.jit(do_not_specialize=["num_parts", "scales_stride"])
def weigh_kernel(
    values_ptr,
    products_ptr,
    squares_ptr,
    base_ptr,
    scale_ptr,
    norm_ptr,
    x_ptr,
    codes_ptr,
    scales_ptr,
    post_ptr,
    comb_ptr,
    pre_ptr,
    next_pre_ptr,
    num_parts,
    scales_stride,
    eps,
    stream_eps,
    post_scale,
    post_eps,
    WIDTH: tl.constexpr,
    WIDTH_P: tl.constexpr,
    STREAMS: tl.constexpr,
    STREAMS_P: tl.constexpr,
    NUM_P: tl.constexpr,
    PARTS_P: tl.constexpr,
    NUM_ITERS: tl.constexpr,
):
    """Compute a token's next input from its streams; another program computes the weights of the resulting output.

    products_ptr, squares_ptr: Outputs of `mix_kernel`.
    x_ptr: [T, WIDTH]; codes_ptr, scales_ptr: Quantized input, or None.
    post_ptr: [T, STREAMS], comb_ptr: [T, STREAMS, STREAMS]; None before the head, comb_ptr also without a comb.
    next_pre_ptr: [T, STREAMS], weights of the streams for the next part's input; None if this part's input takes them.
    pre_ptr: [T, STREAMS], the weights for this part's input with next_pre_ptr; None to take stream 0.
    """
    token = tl.program_id(0).to(tl.int64)
    parts, stream = tl.arange(0, PARTS_P), tl.arange(0, STREAMS_P)
    is_part, is_stream = parts < num_parts, stream < STREAMS
    squares = tl.load(squares_ptr + token * num_parts + parts, mask=is_part, other=0.0)
    products_ptr += (token * num_parts + parts)[:, None] * NUM_P
    in_parts = is_part[:, None] & is_stream[None, :]
    if tl.program_id(1) == 0:
        products = tl.load(products_ptr + stream[None, :], mask=in_parts, other=0.0)
        column = tl.arange(0, WIDTH_P)
        is_column = column < WIDTH
        values = ()
        for j in tl.static_range(STREAMS):
            values += (tl.load(values_ptr + (token * STREAMS + j) * WIDTH + column, mask=is_column, other=0.0),)
        norm = tl.load(norm_ptr + column, mask=is_column, other=0.0)
        carried = tl.where(stream == 0, 1.0, 0.0)
        if pre_ptr is not None:
            carried = tl.load(pre_ptr + token * STREAMS + stream, mask=is_stream, other=0.0)
        factor = tl.rsqrt(tl.sum(squares) / (STREAMS * WIDTH) + eps)
        numbers = tl.sum(products, 0) * factor * tl.load(scale_ptr)
        numbers += tl.load(base_ptr + stream, mask=is_stream, other=0.0)
        pre = tl.where(is_stream, tl.sigmoid(numbers) + stream_eps, 0.0)
        if next_pre_ptr is not None:
            tl.store(next_pre_ptr + token * STREAMS + stream, pre, mask=is_stream)
            pre = carried
        row = tl.zeros([WIDTH_P], tl.float32)
        for j in tl.static_range(STREAMS):
            row += tl.sum(tl.where(stream == j, pre, 0.0)) * values[j].to(tl.float32)
        row = row.to(x_ptr.dtype.element_ty).to(tl.float32)
        x = (row * tl.rsqrt(tl.sum(row * row) / WIDTH + eps) * norm).to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + token * WIDTH + column, x, mask=is_column)
        if codes_ptr is not None:
            store_codes(x, token, 0, codes_ptr, scales_ptr, scales_stride, WIDTH)
    elif post_ptr is not None:
        # A row of the combination is a vector within one warp, so that iterations need no synchronization of warps.
        post_products = tl.load(products_ptr + STREAMS + stream[None, :], mask=in_parts, other=0.0)
        comb_products = ()
        if comb_ptr is not None:
            for j in tl.static_range(STREAMS):
                row_ptrs = products_ptr + (2 + j) * STREAMS + stream[None, :]
                comb_products += (tl.load(row_ptrs, mask=in_parts, other=0.0),)
        factor = tl.rsqrt(tl.sum(squares) / (STREAMS * WIDTH) + eps)
        posts = tl.sum(post_products, 0) * factor * tl.load(scale_ptr + 1)
        posts += tl.load(base_ptr + STREAMS + stream, mask=is_stream, other=0.0)
        post = post_scale * tl.sigmoid(posts) + post_eps
        tl.store(post_ptr + token * STREAMS + stream, post, mask=is_stream)
        if comb_ptr is not None:
            factor *= tl.load(scale_ptr + 2)
            comb = ()
            for j in tl.static_range(STREAMS):
                cells = tl.sum(comb_products[j], 0) * factor
                cells += tl.load(base_ptr + (2 + j) * STREAMS + stream, mask=is_stream, other=0.0)
                cells = tl.where(is_stream, tl.exp(cells - tl.max(tl.where(is_stream, cells, -float("inf")))), 0.0)
                comb += (tl.where(is_stream, cells / tl.sum(cells) + stream_eps, 0.0),)
            comb = _divide_columns(comb, stream_eps)
            for _ in tl.static_range(NUM_ITERS - 1):
                rows = ()
                for j in tl.static_range(STREAMS):
                    rows += (comb[j] / (tl.sum(comb[j]) + stream_eps),)
                comb = _divide_columns(rows, stream_eps)
            for j in tl.static_range(STREAMS):
                tl.store(comb_ptr + (token * STREAMS + j) * STREAMS + stream, comb[j], mask=is_stream)


@triton.jit
def _divide_columns(rows, eps):
    """Return rows, each element divided by its column's sum."""
    total = rows[0]
    for j in tl.static_range(1, len(rows)):
        total += rows[j]
    divided = ()
    for j in tl.static_range(len(rows)):
        divided += (rows[j] / (total + eps),)
    return divided


def enter(
    streams: Streams, projection: Projection, norm: Tensor, constants: Constants, quantizes: bool = False
) -> tuple[PlainRows, Streams]:
    """Compute `model.streams.Connection.forward`."""
    values, products, squares = mix_and_multiply(streams, projection.fn)
    (num_tokens, num_streams, width), num_parts = values.shape, squares.shape[1]
    has_post, has_comb = len(projection.fn) > num_streams, len(projection.fn) > 2 * num_streams
    mixing = None
    if has_post:
        comb = squares.new_empty(num_tokens, num_streams, num_streams) if has_comb else None
        mixing = Mixing(squares.new_empty(num_tokens, num_streams), comb)
    next_pre = squares.new_empty(num_tokens, num_streams) if constants.delays else None
    x = values.new_empty(num_tokens, width)
    quantized = QuantizedRows(*empty_groups(x)) if quantizes else None
    if num_tokens:
        weigh_kernel[(num_tokens, 1 + has_post)](
            values,
            products,
            squares,
            projection.base,
            projection.scale,
            norm,
            x,
            *(quantized or (None, None)),
            *(mixing or (None, None)),
            streams.pre,
            next_pre,
            num_parts,
            quantized.scales.stride(1) if quantized else 0,
            constants.eps,
            constants.stream_eps,
            constants.post_scale,
            constants.post_eps,
            WIDTH=width,
            WIDTH_P=triton.next_power_of_2(width),
            STREAMS=num_streams,
            STREAMS_P=triton.next_power_of_2(num_streams),
            NUM_P=products.shape[2],
            PARTS_P=triton.next_power_of_2(triton.cdiv(width, PART.value)),
            NUM_ITERS=constants.num_iters,
            num_warps=8 if width <= 4096 else 16,
        )
    return NormedRows(x, quantized) if quantized else x, Streams(values, mixing, pre=next_pre)
