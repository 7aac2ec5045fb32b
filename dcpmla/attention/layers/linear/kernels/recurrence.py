"""Kimi Delta Attention in one Triton kernel: a program for each request and head, which holds the head's memory in
registers.
"""

import triton
import triton.language as tl

from dcpmla.attention.layers.linear import calls
from dcpmla.attention.layers.linear.calls import DeltaCall, DeltaRequests


def delta_attention(call: DeltaCall, requests: DeltaRequests) -> None:
    """Launch the kernel of `dcpmla.attention.layers.linear.delta.delta_attention`."""
    out, tokens, weights, state, eps, decay_floor = call
    num_heads, dim = len(weights.log_rate), len(weights.norm)
    _attend[len(requests.state), num_heads](
        out,
        *tokens,
        *weights,
        *state,
        *requests,
        *(column.stride(0) for column in tokens),
        eps,
        0.0 if decay_floor is None else decay_floor,
        HAS_FLOOR=decay_floor is not None,
        HEADS=num_heads,
        DIM=dim,
        WIDTH=triton.next_power_of_2(dim),
        CONV=weights.conv.shape[1],
        NUM_RECENT=state.recent.shape[1],
        NUM_COPIES=state.memory.shape[1],
        NORM_EPS=calls.NORM_EPS,
        LINEAR_FROM=calls.LINEAR_FROM,
        num_warps=4,
    )


@triton.jit
def _attend(
    out,
    qkv,
    decay,
    beta,
    gate,
    conv,
    log_rate,
    decay_bias,
    norm,
    recent,
    memory,
    start,
    first_position,
    end,
    state,
    qkv_stride,
    decay_stride,
    beta_stride,
    gate_stride,
    eps,
    floor,
    HAS_FLOOR: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    CONV: tl.constexpr,
    NUM_RECENT: tl.constexpr,
    NUM_COPIES: tl.constexpr,
    NORM_EPS: tl.constexpr,
    LINEAR_FROM: tl.constexpr,
):
    """Attend with one request's tokens in one head."""
    request, head = tl.program_id(0), tl.program_id(1)
    columns = tl.arange(0, WIDTH)
    in_head = columns < DIM
    first, number = tl.load(first_position + request), tl.load(state + request).to(tl.int64)
    row = tl.load(start + request).to(tl.int64)
    num_tokens = tl.where(number < 0, 0, tl.load(end + request) - first)
    own = head * DIM + columns
    if num_tokens == 0:
        return
    recent += number * NUM_RECENT * 3 * HEADS * DIM
    memory += (number * NUM_COPIES * HEADS + head) * DIM * DIM
    square = columns[:, None] * DIM + columns[None, :]
    in_square = in_head[:, None] & in_head[None, :]
    before = (first + NUM_COPIES - 1) % NUM_COPIES
    memory_now = tl.load(memory + before * HEADS * DIM * DIM + square, in_square, 0.0)
    memory_now = tl.where(first > 0, memory_now, 0.0)  # a fresh request's memory is of another one
    rate = tl.exp(tl.load(log_rate + head))
    bias = tl.load(decay_bias + own, in_head, 0.0)
    norm_weight = tl.load(norm + columns, in_head, 0.0)
    for index in range(num_tokens):
        q = _convolve(qkv, recent, conv, own, row, index, first, qkv_stride, in_head, HEADS, DIM, CONV, NUM_RECENT, 0)
        k = _convolve(qkv, recent, conv, own, row, index, first, qkv_stride, in_head, HEADS, DIM, CONV, NUM_RECENT, 1)
        v = _convolve(qkv, recent, conv, own, row, index, first, qkv_stride, in_head, HEADS, DIM, CONV, NUM_RECENT, 2)
        q = q * tl.rsqrt(tl.sum(q * q) + NORM_EPS) * (1 / tl.sqrt(DIM * 1.0))
        k = k * tl.rsqrt(tl.sum(k * k) + NORM_EPS)
        biased = tl.load(decay + (row + index) * decay_stride + own, in_head, 0.0).to(tl.float32) + bias
        if HAS_FLOOR:
            log = floor * tl.sigmoid(rate * biased)
        else:
            log = -rate * tl.where(biased > LINEAR_FROM, biased, tl.log(1 + tl.exp(biased)))
        learned = tl.sigmoid(tl.load(beta + (row + index) * beta_stride + head).to(tl.float32))
        memory_now *= tl.exp(log)[:, None]
        error = v - tl.sum(memory_now * k[:, None], 0)
        memory_now += k[:, None] * (learned * error)[None, :]
        attended = tl.sum(memory_now * q[:, None], 0)
        attended *= tl.rsqrt(tl.sum(attended * attended) / DIM + eps) * norm_weight
        attended *= tl.sigmoid(tl.load(gate + (row + index) * gate_stride + own, in_head, 0.0).to(tl.float32))
        tl.store(out + (row + index) * HEADS * DIM + own, attended, in_head)
        if index + NUM_COPIES >= num_tokens:
            copy = (first + index) % NUM_COPIES
            tl.store(memory + copy * HEADS * DIM * DIM + square, memory_now, in_square)
    for index in range(max(num_tokens - NUM_RECENT, 0), num_tokens):
        for part in tl.static_range(3):
            at = part * HEADS * DIM + own
            inputs = tl.load(qkv + (row + index) * qkv_stride + at, in_head)
            tl.store(recent + (first + index) % NUM_RECENT * 3 * HEADS * DIM + at, inputs, in_head)


@triton.jit
def _convolve(
    qkv,
    recent,
    conv,
    own,
    row,
    index,
    first,
    qkv_stride,
    in_head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    CONV: tl.constexpr,
    NUM_RECENT: tl.constexpr,
    PART: tl.constexpr,
):
    """Return SiLU of the convolution of a head's queries (part 0), keys or values at a token, rounded to their dtype.

    Inputs of earlier steps are among the recent ones.
    """
    at = PART * HEADS * DIM + own
    total = tl.zeros_like(own).to(tl.float32)
    for tap in tl.static_range(CONV):
        back = tl.zeros_like(own) + (index + tap - (CONV - 1))
        position = first + back
        new = tl.load(qkv + (row + back) * qkv_stride + at, in_head & (back >= 0), 0.0).to(tl.float32)
        slot = (position + NUM_RECENT) % NUM_RECENT
        old = tl.load(recent + slot * 3 * HEADS * DIM + at, in_head & (back < 0) & (position >= 0), 0.0).to(tl.float32)
        total += (new + old) * tl.load(conv + at * CONV + tap, in_head, 0.0).to(tl.float32)
    return (total * tl.sigmoid(total)).to(qkv.dtype.element_ty).to(tl.float32)
