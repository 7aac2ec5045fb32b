"""The arguments of the operators of attention with keys and values of each head."""

from typing import NamedTuple

from torch import Tensor


class GroupedCall(NamedTuple):
    """Queries, and the cached keys and values of one rank.

    Attributes:
        q: Queries [T, H, D], rotated, request after request.
        cache: Keys and values [num_blocks, block_size, 2 G D] in q's dtype: of each of G heads the key, then the value.
            H / G successive heads of queries attend to the same head.
        block_table: Block ids of each request [num_reqs, max_blocks], int32; entries after its last block are not read.
        request: Request of each token [T], int32; it does not decrease among tokens that see keys.
        seq_lens: Number of keys that each token sees [T], int32: the first ones of its request in this cache, which
            under DCP holds this rank's tokens alone. 0 for padding.
        softmax_scale: Factor of the scores.
    """

    q: Tensor
    cache: Tensor
    block_table: Tensor
    request: Tensor
    seq_lens: Tensor
    softmax_scale: float

    @property
    def num_kv_heads(self) -> int:
        """Return G."""
        return self.cache.shape[2] // (2 * self.q.shape[2])
