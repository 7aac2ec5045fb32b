"""Search for the smallest size from which on a condition holds."""

from bisect import bisect_left
from collections.abc import Callable
from itertools import chain


def smallest(holds: Callable[[int], bool], limit: int = 1 << 24) -> int | None:
    """Find the smallest size up to a limit at which a condition holds that, once it does, holds up to the next power of
    two; None if it holds neither at a power of two nor at the limit.
    """
    powers = (1 << exponent for exponent in range(limit.bit_length()))
    high = next((size for size in chain(powers, [limit]) if size and holds(size)), None)
    return high and bisect_left(range(high), True, lo=high // 2 + 1, key=holds)
