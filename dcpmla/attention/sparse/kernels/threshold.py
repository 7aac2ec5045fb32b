"""The threshold that parts the best of a tile of keys from the others: by counting, since sorting them would cost several times as much.

Keys are integers in the registers of one program. How many lie above a guess costs a comparison a key and one sum over the program, so what
matters is the number of guesses: a sample of the keys gives the first two, interpolation between the counts the others, about six.
"""

import triton
import triton.language as tl

LEAST = tl.constexpr(-(2**31))  # no key
_MOST = tl.constexpr(2**31 - 1)
SAMPLES = tl.constexpr(128)
_DEVIATIONS = tl.constexpr(1.5)  # that the first guesses lie beside the threshold; wider, more is left between them, narrower, they miss it


@triton.jit
def _count(is_counted):
    return tl.sum(is_counted.to(tl.int32))


@triton.jit
def _first_bracket(keys, num_keys, want, sample, num_sampled):
    """A bracket, as in `_search`, between two of the sample [SAMPLES] that stands for num_sampled keys."""
    rank = tl.sum((sample[None, :] > sample[:, None]).to(tl.int32), 1)
    share = want.to(tl.float32) / num_sampled
    wanted_rank = share * SAMPLES
    margin = _DEVIATIONS * tl.sqrt(wanted_rank * (1.0 - share)) + 1.0  # of a binomial distribution
    is_below, is_above = rank >= wanted_rank + margin, rank + 1 <= wanted_rank - margin
    low, high = tl.max(tl.where(is_below, sample, LEAST + 1)), tl.min(tl.where(is_above, sample, _MOST))
    from_low, above_high = _count(keys >= low), _count(keys > high)
    if from_low < want:
        high, above_high = low - 1, from_low
        low, from_low = tl.cast(LEAST + 1, tl.int32), num_keys
    elif above_high >= want:
        low, from_low = high + 1, above_high
        high, above_high = tl.cast(_MOST, tl.int32), 0
    return low, high, from_low, above_high


@triton.jit
def _search(keys, want, low, high, from_low, above_high):
    """Find a threshold in a bracket: from_low >= want keys are no less than low, above_high < want are greater than high.

    Returns:
        (threshold, how many keys are no less than it, how many are greater): the first is `want`, or the threshold is the last wanted key.
    """
    over, under = (from_low - want).to(tl.float32), (want - above_high).to(tl.float32)
    step, last_move = 0, 0
    while (from_low != want) & (low < high):
        part = over / (over + under)
        if step % 6 == 5:
            # Keys may lie where interpolation does not lead: the bracket shrinks to the keys in it, and to half of what they span.
            high, low = tl.max(tl.where(keys <= high, keys, LEAST)), tl.min(tl.where(keys >= low, keys, _MOST))
            part = 0.5
        span = (high.to(tl.int64) - low).to(tl.float32)
        guess = tl.minimum(low + (span * part).to(tl.int64), high.to(tl.int64) - 1).to(tl.int32)
        above = _count(keys > guess)
        # An end that stays twice counts for half (the Illinois rule), else guesses would come near from one side only.
        if above >= want:
            low, from_low = guess + 1, above
            over = (above - want).to(tl.float32)
            under = tl.where(last_move == 1, under * 0.5, under)
            last_move = 1
        else:
            high, above_high = guess, above
            under = (want - above).to(tl.float32)
            over = tl.where(last_move == -1, over * 0.5, over)
            last_move = -1
        step += 1
    return low, from_low, above_high


@triton.jit
def best_of(high, low, num_keys, want, sample, num_sampled):
    """Which are the `want` best of a tile of keys, compared by their high words, and where these are equal by their low ones.

    Args:
        high, low: int32; LEAST in high is no key, low is not negative, no two keys are equal in both.
        num_keys: how many keys there are; more than want, and want is at least 1.
        sample: [SAMPLES] of num_sampled high words, evenly spread, with those that are none among them.
    """
    # fmt: off
    threshold, num_best, num_above = _search(high, want, *_first_bracket(high, num_keys, want, sample, num_sampled))
    # fmt: on
    is_best = high >= threshold
    if num_best != want:
        tied = high == threshold
        low = tl.where(tied, low, -1)
        last, first = tl.max(low), tl.min(tl.where(tied, low, _MOST))
        low_threshold, _, _ = _search(low, want - num_above, first, last, num_best - num_above, tl.cast(0, tl.int32))
        is_best = (high > threshold) | (low >= low_threshold)
    return is_best
