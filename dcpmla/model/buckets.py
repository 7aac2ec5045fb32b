"""The hash functions of n-grams (`dcpmla.model.ngrams`)."""

from typing import NamedTuple

from torch import Tensor


class Buckets(NamedTuple):
    """The hash functions of L layers with a memory. Each of C columns has a bucket, a range of a layer's table.

    Attributes:
        multipliers: Factors of compressed ids, by distance from the last token, int64 [L, N].
        orders: Number of tokens of each column's n-grams, int64 [C].
        primes: Rows of each column's bucket, int64 [L, C].
        starts: First row of each bucket, int64 [L, C].
    """

    multipliers: Tensor
    orders: Tensor
    primes: Tensor
    starts: Tensor
