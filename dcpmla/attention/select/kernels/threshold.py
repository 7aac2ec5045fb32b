"""The threshold that separates a tile's best keys from the rest, by counting: sorting costs several times as much.

Keys are float32 in the registers of one program; NaN marks elements that are no key. Counting the keys that are at
least a guess costs two instructions a key and one sum over the program, so the number of rounds dominates: a
sample of the keys gives the first two guesses, the counts give the later ones. Guesses are integers in the order of the
numbers (`order_of`); neighbouring numbers differ by one there, so any two numbers can be separated.
"""

import triton
import triton.language as tl

SAMPLES = tl.constexpr(128)
LOWEST = tl.constexpr(-0x7F800001)  # order of -inf
BEYOND = tl.constexpr(0x7F800001)  # order of a NaN, above all keys
# Distance of the guesses from the estimate: more leaves more keys between guesses, fewer misses the threshold.
_DEVIATIONS = tl.constexpr(1.5)
_INTERPOLATED = tl.constexpr(8)  # rounds, before guesses cut the remaining range into thirds


@triton.jit
def order_of(numbers):
    """Map float32 numbers to int32 in the same order: the high words of `pack_candidates`."""
    bits = (numbers + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def number_of(order):
    """Invert `order_of`."""
    order = tl.where(order == -1, 0, order)  # -1 would be -0
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def no_less(numbers, bound):
    """Return 1.0 where a number is at least bound, else 0.0, in one instruction whose result another pipe can add."""
    return tl.inline_asm_elementwise(
        "set.ge.f32.f32 $0, $1, $2;", "=f,f,f", [numbers, bound], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _of_thread(counted):
    """Sum [loads, warps, lanes, width] -> [warps, lanes] without communication between threads."""
    return tl.sum(tl.sum(counted, 3), 0)


@triton.jit
def count(keys, bound):
    """Count the keys that are at least bound."""
    return tl.sum(tl.ravel(_of_thread(no_less(keys, bound)).to(tl.int32)))


@triton.jit
def _count_both(keys, low, high):
    """Count the keys that are at least low, and those at least high, with one sum for both."""
    BITS: tl.constexpr = 16 if keys.numel < 65536 else 32
    packed: tl.constexpr = tl.int32 if BITS == 16 else tl.int64
    from_low, from_high = _of_thread(no_less(keys, number_of(low))), _of_thread(no_less(keys, number_of(high)))
    both = tl.sum(tl.ravel(from_low.to(packed) | (from_high.to(packed) << BITS)))
    return (both & ((1 << BITS) - 1)).to(tl.int32), ((both >> BITS) & ((1 << BITS) - 1)).to(tl.int32)


@triton.jit
def sample_guesses(sample, want, num_sampled):
    """Estimate two orders that probably enclose the last of the `want` best keys.

    sample holds [SAMPLES] of num_sampled keys, NaN for no key.
    """
    sample = tl.where(sample == sample, sample, float("-inf"))
    rank = tl.sum((sample[None, :] > sample[:, None]).to(tl.int32), 1)
    share = want.to(tl.float32) / num_sampled
    wanted_rank = share * SAMPLES
    margin = _DEVIATIONS * tl.sqrt(wanted_rank * (1.0 - share)) + 1.0  # standard deviations of a binomial distribution
    low = tl.max(tl.where(rank >= wanted_rank + margin, sample, float("-inf")))
    high = tl.min(tl.where(rank + 1 <= wanted_rank - margin, sample, float("inf")))
    return order_of(low), order_of(high)


@triton.jit
def _between(low, high, part, by_value):
    """Return an order between two others, `part` of the way; with by_value, of the way between their finite numbers."""
    span = (high - low).to(tl.uint32, bitcast=True)
    guess = low + tl.minimum(tl.maximum((span.to(tl.float32) * part).to(tl.uint32), 1), span - 1).to(
        tl.int32, bitcast=True
    )
    first = number_of(low)
    number = first + (number_of(high) - first) * part
    is_finite = tl.abs(number) < float("inf")
    return tl.where(by_value & is_finite, tl.minimum(tl.maximum(order_of(number), low + 1), high - 1), guess)


@triton.jit
def _search(keys, num_keys, want, guesses, BY_VALUE: tl.constexpr):
    """Separate the `want` best of more keys from the rest.

    BY_VALUE: keys are spread evenly as numbers rather than as orders.

    Returns:
        (low, high, from_low, from_high): two orders, and counts of keys at least each, from_low >= want > from_high.
        Either from_low is `want`, or high is low + 1: then all keys from low up to high are equal, and only some keys
        among these ties are wanted.
    """
    low, from_low = tl.cast(LOWEST, tl.int32), num_keys
    high, from_high = tl.cast(BEYOND, tl.int32), tl.cast(0, tl.int32)
    low_guess, high_guess = guesses
    step = 0
    while (from_low != want) & (high - low != 1):
        from_low_guess, from_high_guess = _count_both(keys, low_guess, high_guess)
        is_above, is_below = from_high_guess >= want, from_low_guess < want
        new_low, new_high = tl.where(is_above, high_guess, low_guess), tl.where(is_below, low_guess, high_guess)
        new_from_low = tl.where(is_above, from_high_guess, from_low_guess)
        new_from_high = tl.where(is_below, from_low_guess, from_high_guess)
        low, from_low = tl.where(is_below, low, new_low), tl.where(is_below, from_low, new_from_low)
        high, from_high = tl.where(is_above, high, new_high), tl.where(is_above, from_high, new_from_high)
        left = (from_low - from_high).to(tl.float32)
        part = tl.fdiv((from_low - want).to(tl.float32), left)
        margin = _DEVIATIONS * tl.sqrt(tl.fdiv(part * (1.0 - part), left))
        is_guided = step < _INTERPOLATED
        low_part = tl.where(is_guided, tl.maximum(part - margin, 0.8 * part), 1 / 3)
        high_part = tl.where(is_guided, tl.minimum(part + margin, 0.8 * part + 0.2), 2 / 3)
        low_guess = _between(low, high, low_part, is_guided & BY_VALUE)
        high_guess = _between(low, high, high_part, is_guided & BY_VALUE)
        step += 1
    return low, high, from_low, from_high


@triton.jit
def best_of(keys, low_words, num_keys, want, guesses):
    """Separate the `want` best of more keys from the rest; among equal keys, greater low words come first.

    Args:
        keys, low_words: Keys and low words, [loads, warps, lanes, width]; low words in [0, 2^31).
        num_keys: Number of keys that are not NaN.
        guesses: Two orders, see `sample_guesses`.
    Returns:
        (keys, bound): the best keys are at least bound; equal keys that lost the tie have become NaN. Keys that are
        equal in both words count as one, so fewer than `want` keys may remain.
    """
    low, _, from_low, from_high = _search(keys, num_keys, want, guesses, True)
    bound = number_of(low)
    if from_low != want:
        is_tied = keys == bound
        order = low_words - 0x800000  # shifts the greatest order to a finite number
        order = tl.where(order < 0, order - 1, order)  # -1 is the order of no number
        tied = tl.where(is_tied, number_of(order), float("nan"))
        least = order_of(tl.min(tl.ravel(tl.where(is_tied, tied, float("inf")))))
        greatest = order_of(tl.max(tl.ravel(tl.where(is_tied, tied, float("-inf")))))
        want -= from_high
        at, above, from_at, _ = _search(tied, from_low - from_high, want, (least, greatest), False)
        last = number_of(tl.where(from_at == want, at, above))
        keys = tl.where(is_tied, tl.where(tied >= last, keys, float("nan")), keys)
    return keys, bound
