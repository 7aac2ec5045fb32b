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
def _load_gate(first, token, num, stride, column, WIDTH: tl.constexpr, HALVES: tl.constexpr, GATES: tl.constexpr):
    """Load the gate of a token, its bias added; -inf from token num on."""
    pairs_ptr, bias_ptr = first
    mask = column < tl.where(token < num, WIDTH, 0)
    gate = tl.load(pairs_ptr + token * stride + GATES + column, mask=mask, other=0.0).to(tl.float32)
    gate += tl.load(bias_ptr + token * (HALVES * WIDTH) + column, mask=mask, other=0.0)
    return tl.where(token < num, gate, float("-inf"))


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
    """Add num tokens, at most RATIO, to an entry's sums, TOKENS at a time.

    A thread keeps its columns, so nothing is sent between threads; loops over TOKENS are unrolled, so that their loads
    overlap.

    first: Pointers to the first token's values and bias. GATES: Columns from a value to its gate.
    """
    pairs_ptr, _ = first
    for start in range(0, num if TOKENS < RATIO else 1, TOKENS):
        peak = tl.full(column.shape, float("-inf"), tl.float32)
        for index in tl.static_range(TOKENS):
            peak = tl.maximum(peak, _load_gate(first, start + index, num, stride, column, WIDTH, HALVES, GATES))
        shift = _shift(peak)
        total, values = tl.zeros_like(peak), tl.zeros_like(peak)
        for index in tl.static_range(TOKENS):
            token = start + index
            weight = tl.exp(_load_gate(first, token, num, stride, column, WIDTH, HALVES, GATES) - shift)
            mask = column < tl.where(token < num, WIDTH, 0)
            total += weight
            values += weight * tl.load(pairs_ptr + token * stride + column, mask=mask, other=0.0).to(tl.float32)
        sums = merge(sums, (peak, total, values))
    return sums


@triton.jit
def choose(condition, sums, second):
    """Return sums where the condition holds, else second."""
    return (
        tl.where(condition, sums[0], second[0]),
        tl.where(condition, sums[1], second[1]),
        tl.where(condition, sums[2], second[2]),
    )
