"""Sums over the ranks of a tensor-parallel group, with the residual and the RMSNorm that follow in a decoder block."""

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dcpmla.comm.norm import add_norm, checked, wide_dtype
from dcpmla.comm.select import direct_if_reached
from dcpmla.comm.terms import Partial, Terms, whole
from dcpmla.parallel.collectives import named
from dcpmla.parallel.fixed import sum_in_order
from dcpmla.parallel.quantized import NormedRows, PlainRows


class Reduce(Protocol):
    """Sums over the ranks of a TP group. Every rank makes the same calls with the same shapes, in the same
    order, on one stream; results have the same bits on all ranks.
    """

    name: str

    @property
    def fault(self) -> Tensor | None:
        """Return the fault record (`Exchange.fault`)."""

    def all_reduce(self, partial: Partial) -> Tensor:
        """Return the sum [T, N] of all ranks' partial rows [T, N], whose memory it may overwrite."""

    def add_norm(
        self, partial: Partial, residual: Tensor, weight: Tensor, eps: float, quantizes: bool = False
    ) -> tuple[PlainRows, Tensor]:
        """Add all ranks' partial rows to the residual, and norm the sum.

        Args:
            partial: This rank's part [T, N] of attention's or an MLP's output; may be overwritten, as in `all_reduce`.
            residual: Residual [T, N] in the same dtype, the same on all ranks.
            weight: Weight [N] of the norm.
            quantizes: Whether the norm's result is also quantized, with the bits of `quantize_rows`; N is a multiple of
                128 then.
        Returns:
            `rms_norm` of the new residual, and the new residual [T, N]: the sum of the ranks' parts, rounded once.
        Raises:
            ValueError: Shapes or dtypes do not match.
        """

    def check(self) -> None:
        """Raise the fault that a kernel has recorded. Call this when results are on the host, before they are used.

        Raises:
            PeerFault: A rank did not send its part in time; the results of all sums since then are invalid.
        """


class CollectiveReduce:
    """Sums by one collective: NCCL, which rounds each addition to the dtype, or gloo, in float32 at least. A group of
    one rank does no sum.

    Args:
        is_deterministic: Whether an element's bits depend on its terms alone: float32 sums in rank order.
    """

    name = "collective"
    fault = None

    def __init__(self, group: ProcessGroup, is_deterministic: bool = False) -> None:
        self.group, self.size, self._is_deterministic = group, dist.get_world_size(group), is_deterministic

    def all_reduce(self, partial: Partial) -> Tensor:
        partial = whole(partial)
        return self._sum(partial, "all_reduce").to(partial.dtype)

    def add_norm(
        self, partial: Partial, residual: Tensor, weight: Tensor, eps: float, quantizes: bool = False
    ) -> tuple[PlainRows, Tensor]:
        call = checked(partial, residual, weight, eps, quantizes)
        if self.size > 1:
            call = call._replace(rows=Terms(self._sum(whole(partial), "add_norm")))
        normed, new_residual, *codes = add_norm(call)
        return NormedRows.join(normed, *codes), new_residual

    def check(self) -> None:
        pass  # a failed collective ends its rank, or raises at the call

    def _sum(self, partial: Tensor, operation: str) -> Tensor:
        if self.size == 1:
            return partial
        if self._is_deterministic:
            return sum_in_order(partial, self.group, operation)
        partial = partial.contiguous() if partial.is_cuda else partial.to(wide_dtype(partial.dtype))
        with named(operation, self.group):
            dist.all_reduce(partial, group=self.group)
        return partial


def select_reduce(
    tp_group: ProcessGroup, device: torch.device, timeout: float = 60.0, is_deterministic: bool = False
) -> Reduce:
    """Build the sums for a TP group: `direct` if all ranks reach each other over NVLink, else collectives.

    Collective over the group, and the same on all its ranks.

    Args:
        timeout: Seconds for which `direct` waits for a peer.
        is_deterministic: Whether an element's bits depend on its terms alone, not on the other rows.
    """

    def new_direct() -> Reduce:
        from dcpmla.comm.direct_reduce import DirectReduce  # triton exists on Linux only

        return DirectReduce(tp_group, device, timeout=timeout, is_deterministic=is_deterministic)

    if dist.get_world_size(tp_group) == 1:
        return CollectiveReduce(tp_group, is_deterministic)
    direct, _ = direct_if_reached(tp_group, device, new_direct)
    return direct or CollectiveReduce(tp_group, is_deterministic)
