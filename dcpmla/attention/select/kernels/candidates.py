"""Tiles of keys and of candidates in a program's registers."""

import triton
import triton.language as tl

from dcpmla.attention.select import candidates as packing
from dcpmla.attention.select.kernels.threshold import (
    BEYOND,
    LOWEST,
    SAMPLES,
    best_of,
    count,
    number_of,
    order_of,
    sample_guesses,
)

EMPTY = tl.constexpr(packing.EMPTY)
_LANES = tl.constexpr(32)


@triton.jit
def load_sample(keys_ptr, num_keys, width):
    """Load [SAMPLES] evenly spread keys of more than `width`.

    Four threads load each key, because with fewer loads than threads the compiler would repeat the load at every use.
    """
    index = tl.broadcast_to(((2 * tl.arange(0, SAMPLES) + 1) * num_keys // (2 * SAMPLES))[:, None], [SAMPLES, 4])
    return tl.max(tl.load(keys_ptr + index, mask=index < tl.where(num_keys > width, num_keys, 0), other=0), 1)


@triton.jit
def by_thread(values, WARPS: tl.constexpr, WIDTH: tl.constexpr):
    """Reshape a tile as it was loaded, WIDTH elements a thread, to [loads, warps, lanes, width]; no element moves."""
    return tl.reshape(values, [values.shape[0] // (WARPS * _LANES * WIDTH), WARPS, _LANES, WIDTH])


@triton.jit
def pack(keys, low_words):
    """Pack keys and low words into candidates."""
    return (order_of(keys).to(tl.int64) << 32) | low_words


@triton.jit
def load_best(candidates_ptr, num_candidates, width, TILE: tl.constexpr, WARPS: tl.constexpr):
    """Load a tile of candidates; return its keys, their low words and the bound that its best `width` keys reach."""
    sample = load_sample(candidates_ptr, num_candidates, width)
    index = tl.arange(0, TILE)
    candidates = by_thread(tl.load(candidates_ptr + index, mask=index < num_candidates, other=EMPTY), WARPS, 2)
    guesses = (tl.cast(LOWEST, tl.int32), tl.cast(BEYOND, tl.int32))
    if num_candidates > width:
        guesses = sample_guesses(number_of((sample >> 32).to(tl.int32)), tl.cast(width, tl.int32), num_candidates)
    keys, low_words = number_of((candidates >> 32).to(tl.int32)), candidates.to(tl.int32) & 0x7FFFFFFF
    bound = tl.cast(float("-inf"), tl.float32)
    num_keys = count(keys, bound)  # EMPTY is a NaN
    if num_keys > width:
        keys, bound = best_of(keys, low_words, num_keys, tl.cast(width, tl.int32), guesses)
    return keys, low_words, bound
