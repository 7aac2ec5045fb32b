"""The Triton kernel of the compressor with its launcher; `attention/select/compressor.py` specifies it."""

import triton
import triton.language as tl

from dcpmla.attention.select.entries import Pooling, PoolUpdate
from dcpmla.attention.select.kernels.sums import add_tokens, choose, load_sums, merge, store_sums
from dcpmla.attention.triton.rope import load_pairs, norm_factor, rotate_range, store_pairs
from dcpmla.cache import index_keys
from dcpmla.cache.kernels import quantize_pairs, store_shared

_TOKENS = 8  # most tokens of a span that are pooled at a time
_SMALLEST_AMAX = tl.constexpr(index_keys.SMALLEST_AMAX)


@triton.jit
def _transform(x, y, BITS: tl.constexpr):
    """Multiply a row of 2^BITS columns, given as pairs [1, PAIRS], by `hadamard_matrix`.

    Each round adds and subtracts the columns whose numbers differ in the last bit, and moves that bit to the front.
    """
    PAIRS: tl.constexpr = x.shape[1]
    dtype: tl.constexpr = x.dtype
    x, y = tl.reshape(x, [PAIRS]).to(tl.float32), tl.reshape(y, [PAIRS]).to(tl.float32)
    for _ in tl.static_range(BITS):
        row = tl.reshape(tl.trans(tl.join(x + y, x - y)), [2 * PAIRS])
        x, y = tl.split(tl.reshape(row, [PAIRS, 2]))
    factor: tl.constexpr = (2 * PAIRS) ** -0.5
    return tl.reshape((x * factor).to(dtype), [1, PAIRS]), tl.reshape((y * factor).to(dtype), [1, PAIRS])


@triton.jit
def _store_index_key(cache_ptr, stride, block, offset, per_block, x, y, mask, WIDTH: tl.constexpr):
    """Store a key, given as pairs [1, PAIRS], at an offset of a block of an index cache (`dcpmla.cache.index_keys`)."""
    block_ptr = cache_ptr + block * stride
    if cache_ptr.dtype.element_ty == tl.uint8:
        code_x, code_y, scales = quantize_pairs(x, y, _SMALLEST_AMAX, x.shape[1])
        scale_ptr = (block_ptr + per_block * WIDTH).to(tl.pointer_type(tl.float32)) + offset
        tl.store(scale_ptr + tl.zeros([1, 1], tl.int32), scales, mask=mask)
        x = tl.reshape(code_x, x.shape).to(tl.uint8, bitcast=True)
        y = tl.reshape(code_y, y.shape).to(tl.uint8, bitcast=True)
    else:
        x, y = x.to(cache_ptr.dtype.element_ty), y.to(cache_ptr.dtype.element_ty)
    store_pairs(block_ptr + offset * WIDTH + tl.zeros([1, 1], tl.int32), x, y, mask, WIDTH, x.shape[1], True)


@triton.jit
def compress_kernel(
    pairs_ptr,
    bias_ptr,
    weight_ptr,
    sums_ptr,
    cache_ptr,
    positions_ptr,
    request_ptr,
    first_position_ptr,
    end_ptr,
    source_ptr,
    target_ptr,
    cos_sin_ptr,
    table_ptr,
    latents_ptr,
    slots_ptr,
    pairs_stride,
    cache_stride,
    table_stride,
    eps,
    per_block,
    dcp_rank,
    dcp_size,
    interleave,
    RATIO: tl.constexpr,
    HALVES: tl.constexpr,
    WIDTH: tl.constexpr,
    GATES: tl.constexpr,
    ROPE: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    IS_INDEX: tl.constexpr,
    HADAMARD_BITS: tl.constexpr,
):
    """Pool spans of a request's tokens; one program per token, idle unless the token begins a span.

    Only the program of a request's first token in the step reads or writes the request's sums, and it writes last. It
    pools the first span, the next span if entries overlap, and the last span.
    """
    token = tl.program_id(0).to(tl.int64)
    request = tl.load(request_ptr + token)
    source, target = tl.load(source_ptr + request).to(tl.int64), tl.load(target_ptr + request).to(tl.int64)
    position = tl.load(positions_ptr + token).to(tl.int32)
    start, end = tl.load(first_position_ptr + request), tl.load(end_ptr + request)
    first_span = start // RATIO
    own, last = position // RATIO - first_span, (end - 1) // RATIO - first_span  # numbers of spans in the step
    is_first = position == start
    if (target < 0) | (position < start) | (position >= end):
        return
    if (not is_first) & ((position % RATIO != 0) | (own < HALVES) | (own == last)):
        return
    column = tl.arange(0, COLUMNS)
    target_sums_ptr = sums_ptr + target * (HALVES * 3 * WIDTH)
    sums_ptr += source * (HALVES * 3 * WIDTH)
    num_spans = tl.where(is_first, tl.minimum(last, HALVES) + 1, 1)
    for index in range(0, num_spans):
        order = tl.where(is_first, tl.where(index < HALVES, index, last), own)
        begin = tl.maximum(start, (first_span + order) * RATIO)
        at = begin % RATIO  # position in the span of the step's first token
        num = tl.minimum(RATIO - at, end - begin)
        row = token + (begin - position)
        own_ptr, own_bias_ptr = pairs_ptr + row * pairs_stride, bias_ptr + at * (HALVES * WIDTH)
        is_carried = (order == 0) & (start > 0)
        own_half = (own_ptr + (HALVES - 1) * WIDTH, own_bias_ptr + (HALVES - 1) * WIDTH)
        sums = load_sums(sums_ptr, column, is_carried, WIDTH)
        sums = add_tokens(sums, own_half, num, pairs_stride, column, WIDTH, HALVES, GATES, TOKENS, RATIO)
        following = load_sums(sums_ptr, column, False, WIDTH)
        if HALVES == 2:
            num_before = tl.where(order > 0, tl.minimum(begin - start, RATIO), 0)
            before = (pairs_ptr + (row - num_before) * pairs_stride, bias_ptr + (RATIO - num_before) * (HALVES * WIDTH))
            sums = add_tokens(sums, before, num_before, pairs_stride, column, WIDTH, HALVES, GATES, TOKENS, RATIO)
            # The span before was in progress when the step began: its part from then on is in the next entry's sums.
            is_unfinished = (order == 1) & (start % RATIO > 0)
            sums = merge(sums, load_sums(sums_ptr + 3 * WIDTH, column, is_unfinished, WIDTH))
            following = load_sums(sums_ptr + 3 * WIDTH, column, is_carried, WIDTH)
            own_token = (own_ptr, own_bias_ptr)
            following = add_tokens(following, own_token, num, pairs_stride, column, WIDTH, HALVES, GATES, TOKENS, RATIO)
        is_complete = begin - at + RATIO <= end
        if order == last:
            tl.debug_barrier()  # other threads may still read the old values
            store_sums(target_sums_ptr, column, choose(is_complete, following, sums), WIDTH)
            if HALVES == 2:
                left = choose(is_complete, (float("-inf"), 0.0, 0.0), following)
                store_sums(target_sums_ptr + 3 * WIDTH, column, left, WIDTH)
        entry = (first_span + order).to(tl.int64)
        if is_complete & (entry // interleave % dcp_size == dcp_rank):
            one = tl.zeros([1, 1], tl.int64)
            x, y = tl.split(tl.reshape(sums[2] / tl.where(column < WIDTH, sums[1], 1.0), [1, COLUMNS // 2, 2]))
            if weight_ptr is not None:
                factor = norm_factor(x, y, WIDTH, eps)
                weight_x, weight_y = load_pairs(weight_ptr + one, one == 0, WIDTH, COLUMNS // 2, True)
                x, y = x * factor * weight_x, y * factor * weight_y
            dtype: tl.constexpr = pairs_ptr.dtype.element_ty
            x, y = x.to(dtype), y.to(dtype)
            if latents_ptr is not None:
                store_pairs(latents_ptr + row * WIDTH + one, x, y, one == 0, WIDTH, COLUMNS // 2, True)
            if cos_sin_ptr is not None:
                FIRST: tl.constexpr = 0 if IS_INDEX else (WIDTH - ROPE) // 2
                x, y = rotate_range(x, y, cos_sin_ptr + row * ROPE + one, one == 0, 1.0, FIRST, ROPE)
            local = entry // (dcp_size * interleave) * interleave + entry % interleave
            block = tl.load(table_ptr + request.to(tl.int64) * table_stride + local // per_block).to(tl.int64)
            if IS_INDEX:
                if HADAMARD_BITS:
                    x, y = _transform(x, y, HADAMARD_BITS)
                _store_index_key(cache_ptr, cache_stride, block, local % per_block, per_block, x, y, one == 0, WIDTH)
            else:
                slot = block * per_block + local % per_block
                if slots_ptr is not None:
                    tl.store(slots_ptr + row, slot)
                store_shared(cache_ptr, cache_stride, slot + one, x, y, WIDTH)


def compress_(call: Pooling, part: PoolUpdate) -> None:
    """Compute `compressor.compress_` in one kernel."""
    pairs, bias, norm_weight, eps, sums, cache, layout, is_index, hadamard, latents, slots = call
    num_tokens, (_, num_halves, _, width) = len(part.positions), sums.shape
    if num_tokens == 0:
        return
    if is_index:
        index_keys.check_index_cache(cache, cache.dtype, width)
    # In most steps of decodes alone, each request has one token.
    tokens = 1 if num_tokens <= len(part.end) else min(_TOKENS, triton.next_power_of_2(len(bias)))
    compress_kernel[(num_tokens,)](
        pairs,
        bias,
        norm_weight,
        sums,
        cache,
        *part,
        None if layout.cos_sin is None else layout.cos_sin.contiguous(),
        layout.block_table,
        latents,
        slots,
        pairs.stride(0),
        cache.stride(0),
        layout.block_table.stride(0),
        eps,
        layout.entries_per_block,
        *layout.owner,
        RATIO=len(bias),
        HALVES=num_halves,
        WIDTH=width,
        GATES=pairs.shape[1] - num_halves * width,  # values are their own gates if there are none
        ROPE=0 if layout.cos_sin is None else layout.cos_sin.shape[1],
        COLUMNS=triton.next_power_of_2(width),
        TOKENS=tokens,
        IS_INDEX=is_index,
        HADAMARD_BITS=width.bit_length() - 1 if hadamard else 0,
    )
