"""The exchange: everything that ranks send each other in decode context parallelism, as one interface.

A backend implements `Exchange`. Every rank of the group makes the same calls with the same shapes, even a rank that
owns no tokens: its partial rows come with lse -inf.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Mailbox(NamedTuple):
    """The memory of all ranks' GPUs in which an attention kernel leaves rows itself, at the ranks that own their heads.

    A call takes part in one `combine` of exchange `direct` (`comm/direct_ops.py`): `enter` it, store the rows
    (`comm.kernels.landings`), then `collect` what all ranks' rows merge to. For a backend that cannot store them,
    `combine` does it all.

    Attributes:
        addresses: [W] int64, where each rank's landings begin, as this rank sees them.
        state: int32, counters of the exchanges, on the device.
        fault: [1] int64 in pinned memory, written by a kernel that waited in vain.
        landing_bytes: of the rows that may come to a rank at a time.
        timeout: seconds to wait for a peer.
        group_name: of the DCP group.
    """

    addresses: Tensor
    state: Tensor
    fault: Tensor
    landing_bytes: int
    timeout: float
    group_name: str


class Exchange(Protocol):
    """Movement of rows among the W ranks of a DCP group. h heads a rank, D a row's width.

    Queries and cached rows may have elements of one byte, of any 8-bit dtype, if D is even (`pairs`).
    """

    name: str

    @property
    def fault(self) -> Tensor | None:
        """Return [1] int64 in pinned memory, not 0 once a kernel has waited in vain; None where collectives raise by
        themselves.
        """

    def gather_heads(self, q: Tensor) -> Tensor:
        """Gather the queries [T, h, D] of each rank's heads: return [T, W h, D], heads in rank order."""

    def gather_candidates(self, candidates: Tensor) -> Tensor:
        """Gather candidates [T, k] int64, no 32-bit half of which is -1 (`attention.sparse.candidates`): return
        [T, W, k], in rank order.
        """

    def combine(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Merge the ranks' partial attention, and return this rank's heads of it.

        Args:
            out: [T, W h, D], attention of all heads over this rank's tokens, float32 or narrower.
            lse: [T, W h] float32, natural log; -inf where this rank owns no tokens.
        Returns:
            out [T, h, D] in the dtype given (sums in float32), lse [T, h] float32 over all ranks' tokens.
        """

    def mailbox(self, num_tokens: int, num_heads: int, width: int, dtype: torch.dtype) -> Mailbox | None:
        """Return where an attention kernel may store the partial rows of one `combine` itself; None if it may not.

        Args:
            num_heads: W h.
        """

    def start_context(self, rows: Tensor, order: Tensor, tokens: Tensor) -> Callable[[], Tensor]:
        """Start to gather cached rows of all ranks into token order (`gather_context`), while other work runs.

        Args:
            rows: [N, D], this rank's rows, padded to the same N on every rank.
            order: [S] int64, for each token its row in the ranks' rows laid end to end [W N].
            tokens: [N] int64, for each of this rank's rows its token in [0, S), -1 for padding.
        Returns:
            A function to be called once, before the start_context after the next: it waits, and returns [S, D], valid
            until that start_context.
        """

    def reserve_context(self, num_tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate what start_context needs, so that it is seen when the cache's size is planned. Collective.

        Args:
            num_tokens: W N, the most rows of `width` columns that all ranks together bring at a time.
        """

    def check(self) -> None:
        """Raise the fault that a kernel has found. To be called when results are on the host, before they are used.

        Raises:
            PeerFault: a rank did not send its part in time; the results of all exchanges since then are invalid.
        """


def pairs(rows: Tensor) -> Tensor:
    """View rows [..., D] of one-byte elements as bfloat16 [..., D / 2], which every backend moves bit for bit; return
    rows of wider elements as they are.

    Raises:
        ValueError: an odd D.
    """
    if rows.element_size() > 1:
        return rows
    if rows.shape[-1] % 2:
        raise ValueError(
            f"rows of {rows.dtype} have {rows.shape[-1]} elements; the exchange moves even numbers of bytes"
        )
    return rows.contiguous().view(torch.bfloat16)


class LocalExchange:
    """The exchange of a group of one rank: the identity."""

    name = "none"
    fault = None

    def gather_heads(self, q: Tensor) -> Tensor:
        return q

    def gather_candidates(self, candidates: Tensor) -> Tensor:
        return candidates[:, None]

    def combine(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        return out, lse

    def mailbox(self, num_tokens: int, num_heads: int, width: int, dtype: torch.dtype) -> None:
        return None

    def start_context(self, rows: Tensor, order: Tensor, tokens: Tensor) -> Callable[[], Tensor]:
        return lambda: pairs(rows)[order].view(rows.dtype)

    def reserve_context(self, num_tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        torch.empty(
            2 * num_tokens, width, dtype=dtype, device=device
        )  # rows in token order, and the next ones as they were read

    def check(self) -> None:
        pass
