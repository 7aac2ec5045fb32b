"""The exchange: one interface for all data that ranks send each other in decode context parallelism.

A backend implements `Exchange`. Every rank of the group makes the same calls, in the same order, with the same shapes,
even a rank that owns no tokens: its partial rows have lse -inf.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Mailbox(NamedTuple):
    """Memory on all ranks, into which an attention kernel stores each partial row at the rank that owns its head.

    Exchange `direct` alone has one, for calls with one token a segment. With a mailbox `dcp_mla_decode` does not call
    `Exchange.combine`: the attention kernel stores its rows into landings (a rank's memory for its peers' rows), waits
    for the rows of this rank's heads, and merges them. If the chosen kernel stores no rows, `direct_ops.combine` stores
    and merges the rows that it returns. A rank has two landings. Exchanges use them in turn, and clear each row that
    they have read, so that no kernel takes rows of an earlier exchange for its own (`comm/kernels/landings.py`).

    Attributes:
        addresses: Start of each rank's landings in this rank's address space, [W] int64.
        state: Count of exchanges so far for each program of a kernel, by which the program chooses the landing; the
            last element is 1 after a fault. int32 [N], on the device.
        fault: Fault record, [1] int64 in pinned memory, written by a kernel whose wait for a peer timed out.
        landing_bytes: Maximum bytes of rows that a rank receives at a time.
        timeout: Seconds to wait for a peer.
        group_name: Name of the DCP group.
    """

    addresses: Tensor
    state: Tensor
    fault: Tensor
    landing_bytes: int
    timeout: float
    group_name: str


class Exchange(Protocol):
    """Movement of rows among the W ranks of a DCP group: h heads per rank, D columns per row.

    `comm/nccl.py` implements it by collectives, `comm/direct.py` by stores into peers' memory.

    Queries and cached rows may have elements of one byte, of any 8-bit dtype, if D is even (`pairs`).
    """

    name: str

    @property
    def fault(self) -> Tensor | None:
        """Return [1] int64 in pinned memory, nonzero after a kernel's wait timed out; None if collectives raise errors
        themselves.
        """

    def gather_heads(self, q: Tensor) -> Tensor:
        """Gather the queries [T, h, D] of each rank's heads: return [T, W h, D], heads in rank order."""

    def gather_candidates(self, candidates: Tensor) -> Tensor:
        """Gather candidates of sparse MLA [T, k] int64 (`attention.sparse.candidates`): return [T, W, k], in rank
        order. No 32-bit half of a candidate may be -1, which marks memory that a peer has not written yet.
        """

    def combine(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Merge the ranks' partial attention, and return this rank's heads.

        `a2a` merges by `merge.merge_tree`, and so does `direct` if rows are float32; `ag_rs` sums in the order of its
        reduce-scatter.

        Args:
            out: Attention [T, W h, D] of all heads over this rank's tokens, float32 or narrower.
            lse: Log-sum-exp [T, W h], float32, natural log; -inf where a query sees no token of this rank.
        Returns:
            out [T, h, D] in the dtype of `out` (sums in float32), lse [T, h] float32 over all ranks' tokens.
        """

    def mailbox(self, num_tokens: int, num_heads: int, width: int, dtype: torch.dtype) -> Mailbox | None:
        """Return the memory where an attention kernel may store the partial rows of one `combine`; None if it may not.

        Args:
            num_heads: Heads of all ranks, W h.
        """

    def start_context(self, rows: Tensor, order: Tensor, tokens: Tensor) -> Callable[[], Tensor]:
        """Start to gather cached rows of all ranks into token order, while other work runs. In errors and tables of
        benchmarks its name is gather_context.

        Args:
            rows: This rank's rows [N, D], padded to the same N on every rank.
            order: Row of each token in the concatenation [W N] of all ranks' rows, [S] int64, for backends that reorder
                after the gather; 0, 1, .. with one rank.
            tokens: Token in [0, S) of each of this rank's rows, [N] int64, -1 for padding, for backends that store rows
                in token order.
        Returns:
            A function, to be called once, that waits and returns [S, D]. Two buffers alternate: the next call of
            start_context keeps this result, the call after that overwrites it.
        """

    def reserve_context(self, num_tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the memory of start_context, so that memory profiling includes it. Collective.

        Args:
            num_tokens: Maximum number of rows, W N, that all ranks together gather at a time.
        """

    def check(self) -> None:
        """Raise the fault that a kernel has recorded. Call this when results are on the host, before they are used.

        Raises:
            PeerFault: A rank did not send its rows in time; the results of all exchanges since then are invalid.
        """


def pairs(rows: Tensor) -> Tensor:
    """View rows [..., D] of one-byte elements as bfloat16 [..., D / 2], which every backend moves bit for bit; return
    rows of wider elements as they are.

    Raises:
        ValueError: D is odd.
    """
    if rows.element_size() > 1:
        return rows
    if rows.shape[-1] % 2:
        raise ValueError(
            f"rows of {rows.dtype} have {rows.shape[-1]} elements; the exchange moves even numbers of bytes"
        )
    return rows.contiguous().view(torch.bfloat16)


class LocalExchange:
    """The exchange of a group of one rank, which sends nothing."""

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
        return lambda: rows  # in token order already (`ContextChunk`)

    def reserve_context(self, num_tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        torch.empty(2 * num_tokens, width, dtype=dtype, device=device)  # a chunk's rows, and the next chunk's

    def check(self) -> None:
        pass
