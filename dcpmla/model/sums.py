"""Attention residuals: each part of a block takes a mixture of several sums of outputs instead of their one sum.

Blocks come in groups. The sums are the embedding, the sum of each complete group's outputs, and the sum of the outputs
of this group so far. A softmax over the sums weighs them; the logit of a sum is a product with its norm.

Source: Kimi-K3's report, section 2.2; vLLM's Kimi-K3.
"""

import torch
from torch import Tensor, nn

from dcpmla.comm.norm import rms_norm, wide_dtype
from dcpmla.model.calls import Sums
from dcpmla.operators import operator


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
        x, total = mix_sums(sums, self.score, self.norm, self.eps, self.stores)
        if self.stores:
            return x, Sums(stored, num_stored + 1, None)
        return x, Sums(stored, num_stored, current if out is None else total)


def _empty(sums: Sums, _score: Tensor, _norm: Tensor, _eps: float, stores: bool) -> tuple[Tensor, Tensor]:
    current = sums.current
    assert current is not None
    return torch.empty_like(current), current.new_empty(0) if sums.out is None or stores else torch.empty_like(current)


@operator("mix_sums", kernel="dcpmla.model.kernels.sums:mix_sums", fake=_empty, mutates_args=("stored",))
def mix_sums(sums: Sums, score: Tensor, norm: Tensor, eps: float, stores: bool) -> tuple[Tensor, Tensor]:
    """Add an output to the current sum, mix all sums in float32 at least, and norm the mixture. A custom op.

    Args:
        sums: Sums with a current one; with `stores` the new sum becomes row `num_stored` of the stored ones.
        score, norm, eps, stores: Same as in `Mixer`.
    Returns:
        The mixture, normalized, [T, hidden]; the new sum, rounded once, or nothing where it is `current` or stored.
    """
    stored, num_stored, current, out = sums
    assert current is not None
    wide = wide_dtype(current.dtype)
    total = current if out is None else (current.to(wide) + out).to(current.dtype)
    values = torch.cat([stored[:num_stored], total[None]]).to(wide)
    logits = (values * score).sum(-1) * torch.rsqrt(values.square().mean(-1) + eps)
    mixed = (logits.softmax(0)[..., None] * values).sum(0)
    x = rms_norm(mixed, norm.to(wide), eps).to(current.dtype)
    if stores:
        stored[num_stored] = total
    return x, current.new_empty(0) if out is None or stores else total
