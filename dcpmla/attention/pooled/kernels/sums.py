"""Sums of an entry in progress: the gates' peak, their exponentials, exponentials times values, [COLUMNS] each."""

import triton
import triton.language as tl


@triton.jit
def load_sums(sums_ptr, column, is_there, WIDTH: tl.constexpr):
    """Load the sums of an entry; empty sums unless is_there."""
    mask = column < tl.where(is_there, WIDTH, 0)
    peak = tl.load(sums_ptr + column, mask=mask, other=float("-inf"))
    total = tl.load(sums_ptr + WIDTH + column, mask=mask, other=0.0)
    return peak, total, tl.load(sums_ptr + 2 * WIDTH + column, mask=mask, other=0.0)


@triton.jit
def store_sums(sums_ptr, column, sums, WIDTH: tl.constexpr):
    """Store sums in the layout of `load_sums`."""
    for row in tl.static_range(3):
        tl.store(sums_ptr + row * WIDTH + column, sums[row], mask=column < WIDTH)


@triton.jit
def _shift(peak):
    """Return the shift of exponents: the peak, or 0 without tokens, since -inf - -inf is NaN."""
    return tl.where(peak > float("-inf"), peak, 0.0)


@triton.jit
def merge(sums, second):
    """Add two sums of the same entry."""
    peak, total, values = sums
    other_peak, other_total, other_values = second
    new_peak = tl.maximum(peak, other_peak)
    shift = _shift(new_peak)
    factor, other_factor = tl.exp(peak - shift), tl.exp(other_peak - shift)
    return new_peak, total * factor + other_total * other_factor, values * factor + other_values * other_factor


@triton.jit
def _add_tile(
    sums,
    first,
    start,
    num,
    stride,
    column,
    WIDTH: tl.constexpr,
    HALVES: tl.constexpr,
    GATES: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Add TOKENS tokens from number `start` on, as far as there are num, to an entry's sums (`add_tokens`)."""
    pairs_ptr, bias_ptr = first
    token = (start + tl.arange(0, TOKENS))[:, None]
    mask = (token < num) & (column < WIDTH)[None, :]
    token_ptr = pairs_ptr + token * stride + column[None, :]
    value = tl.load(token_ptr, mask=mask, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + token * (HALVES * WIDTH) + column[None, :], mask=mask, other=0.0)
    gate = tl.load(token_ptr + GATES, mask=mask, other=0.0).to(tl.float32) + bias
    gate = tl.where(token < num, gate, float("-inf"))
    peak = tl.max(gate, 0)
    weights = tl.exp(gate - _shift(peak)[None, :])
    return merge(sums, (peak, tl.sum(weights, 0), tl.sum(weights * value, 0)))


@triton.jit
def add_tokens(
    sums,
    first,
    num,
    stride,
    column,
    WIDTH: tl.constexpr,
    HALVES: tl.constexpr,
    GATES: tl.constexpr,
    TOKENS: tl.constexpr,
    RATIO: tl.constexpr,
):
    """Add num tokens, at most RATIO, to an entry's sums.

    first: Pointers to the first token's values and bias. GATES: Columns from a value to its gate.
    """
    if RATIO <= TOKENS:  # without a loop, so that the loads of several calls overlap
        return _add_tile(sums, first, 0, num, stride, column, WIDTH, HALVES, GATES, TOKENS)
    for start in range(0, num, TOKENS):
        sums = _add_tile(sums, first, start, num, stride, column, WIDTH, HALVES, GATES, TOKENS)
    return sums


@triton.jit
def choose(condition, sums, second):
    """Return sums where the condition holds, else second."""
    return (
        tl.where(condition, sums[0], second[0]),
        tl.where(condition, sums[1], second[1]),
        tl.where(condition, sums[2], second[2]),
    )
