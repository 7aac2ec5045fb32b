"""The exchange: the three movements of decode context parallelism, behind one interface.

A backend is one file that implements `Exchange`. Every rank of the group makes the same calls with the same shapes, also a rank that owns
no tokens: its partial rows come with lse -inf.
"""

from typing import Protocol

from torch import Tensor


class Exchange(Protocol):
    """Moves rows among the W ranks of a DCP group. h heads a rank, D a row's width."""

    name: str

    def gather_heads(self, q: Tensor) -> Tensor:
        """[T, h, D] of this rank's heads -> [T, W h, D], heads in rank order."""

    def combine(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Merge the ranks' partial attention and keep this rank's heads.

        Args:
            out: [T, W h, D], attention of all heads over this rank's tokens, float32 or narrower.
            lse: [T, W h] float32, natural log; -inf where this rank owns no tokens.
        Returns:
            out [T, h, D] in the dtype given (sums in float32), lse [T, h] float32 over all ranks' tokens.
        """

    def gather_context(self, rows: Tensor, order: Tensor) -> Tensor:
        """Cached rows of all ranks in token order.

        Args:
            rows: [N, D], this rank's rows, padded to the same N on every rank.
            order: [S] int64, for each token its row in the ranks' rows laid end to end [W N].
        Returns:
            [S, D].
        """


class LocalExchange:
    """The identity: the one rank of a group of one."""

    name = "none"

    def gather_heads(self, q: Tensor) -> Tensor:
        return q

    def combine(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        return out, lse

    def gather_context(self, rows: Tensor, order: Tensor) -> Tensor:
        return rows[order]
