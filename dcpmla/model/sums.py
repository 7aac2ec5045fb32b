"""Attention residuals: each part of a block takes a mixture of several sums of outputs instead of their one sum.

Blocks come in groups. The sums are the embedding, the sum of each complete group's outputs, and the sum of the outputs
of this group so far. A softmax over the sums weighs them; the logit of a sum is a product with its norm.

Source: Kimi-K3's report, section 2.2; vLLM's Kimi-K3.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from dcpmla.comm.norm import rms_norm, wide_dtype
from dcpmla.operators import operator


class Sums(NamedTuple):
    """The residual of a step.

    Attributes:
        stored: The embedding and the sums of complete groups, the first `num_stored` of [B, T, hidden].
        num_stored: Number of stored sums.
        current: [T, hidden], the embedding before the first block, later the sum of a group's outputs; None before a
            group's first output.
        out: [T, hidden], an output that is not added to `current` yet; None for none.
    """

    stored: Tensor
    num_stored: int
    current: Tensor | None
    out: Tensor | None = None

    def add(self, out: Tensor) -> "Sums":
        """Return the sums with a part's output [T, hidden]."""
        return self._replace(current=out) if self.current is None else self._replace(out=out)


class Mixer(nn.Module):
    """The mixture of sums and the norm after it.

    Args:
        score: Weights [hidden], float32, of the logits: the norm's weight times the projection's.
        norm: Weight [hidden] of the norm after the mixture.
        eps: Epsilon of both norms.
        stores: Whether a group begins here: the current sum joins the stored ones.
    """

    def __init__(self, score: Tensor, norm: Tensor, eps: float, stores: bool = False) -> None:
        super().__init__()
        self.score, self.norm = (nn.Parameter(weight, requires_grad=False) for weight in (score, norm))
        self.eps, self.stores = eps, stores

    def forward(self, sums: Sums) -> tuple[Tensor, Sums]:
        """Return a part's input [T, hidden], normalized, and the sums that its output is to be added to."""
        stored, num_stored, current, out = sums
        assert current is not None
        x, total = mix_sums(stored, num_stored, current, out, self.score, self.norm, self.eps, self.stores)
        if self.stores:
            return x, Sums(stored, num_stored + 1, None)
        return x, Sums(stored, num_stored, current if out is None else total)


def _empty(current: Tensor, out: Tensor | None, stores: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(current), current.new_empty(0) if out is None or stores else torch.empty_like(current)


@operator("mix_sums", kernel="dcpmla.model.kernels.sums:mix_sums", fake=_empty, mutates_args=("stored",))
def mix_sums(
    stored: Tensor,
    num_stored: int,
    current: Tensor,
    out: Tensor | None,
    score: Tensor,
    norm: Tensor,
    eps: float,
    stores: bool,
) -> tuple[Tensor, Tensor]:
    """Add an output to the current sum, mix all sums in float32 at least, and norm the mixture. A custom op.

    Args:
        stored: [B, T, hidden]; with `stores` the new sum becomes row `num_stored` of it.
        num_stored: Number of stored sums.
        current: [T, hidden].
        out: [T, hidden], or None.
        score, norm, eps, stores: Same as in `Mixer`.
    Returns:
        The mixture, normalized, [T, hidden]; the new sum, rounded once, or nothing where it is `current` or stored.
    """
    wide = wide_dtype(current.dtype)
    total = current if out is None else (current.to(wide) + out).to(current.dtype)
    values = torch.cat([stored[:num_stored], total[None]]).to(wide)
    logits = (values * score).sum(-1) * torch.rsqrt(values.square().mean(-1) + eps)
    mixed = (logits.softmax(0)[..., None] * values).sum(0)
    x = rms_norm(mixed, norm.to(wide), eps).to(current.dtype)
    if stores:
        stored[num_stored] = total
    return x, current.new_empty(0) if out is None or stores else total
