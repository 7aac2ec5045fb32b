"""Experts over rows that are narrower than hidden states (latent experts)."""

from torch import Tensor, nn

from dcpmla.comm.norm import rms_norm
from dcpmla.comm.reduce import Reduce
from dcpmla.comm.terms import Partial
from dcpmla.parallel.linear import Linear


class Latent(nn.Module):
    """The latents of a layer's routed experts: rows narrower than x, which they take and return (Kimi-K3).

    Args:
        down: Projection of x to latents, whole on each rank.
        up: Projection of this rank's columns of latents to hidden states.
        norm: Weight [latent] of the norm of the experts' sum; None without a norm.
        eps: Epsilon of the norm.
        columns: Columns of this rank.
        reduce: Sums over the TP group.
    """

    def __init__(
        self, down: Linear, up: Linear, norm: Tensor | None, eps: float, columns: slice, reduce: Reduce
    ) -> None:
        super().__init__()
        self.down, self.up, self.eps, self.columns, self.reduce = down, up, eps, columns, reduce
        self.norm = None if norm is None else nn.Parameter(norm, requires_grad=False)

    def leave(self, partial: Partial) -> Tensor:
        """Return this rank's share [T, hidden] of the output, for its experts' share [T, latent]. Collective."""
        summed = self.reduce.all_reduce(partial)
        if self.norm is not None:
            summed = rms_norm(summed, self.norm, self.eps)
        out: Tensor = self.up(summed[:, self.columns])
        return out
