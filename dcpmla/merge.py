"""Attention over parts of the keys -> attention over all of them, by the log-sum-exp (LSE) of the scores of each part.

The reduction of Flash-Decoding. LSE is natural log; a part without keys has lse -inf, and its weight is zero whatever its rows hold.
"""

import torch
from torch import Tensor


def merge_partials(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge partial attention over disjoint sets of keys.

    Args:
        out: [N, T, H, D], any float dtype; a row whose lse is -inf may hold anything, NaN included.
        lse: [N, T, H] float32, natural log.
    Returns:
        out [T, H, D] in the dtype given and lse [T, H] float32; zeros and -inf where every part is empty. Sums are in float32 at least.
    Raises:
        ValueError: shapes that do not belong together.
    Source: the reduction of Flash-Decoding (online softmax).
    """
    if out.ndim != 4 or out.shape[:-1] != lse.shape:
        shapes = f"out has shape {tuple(out.shape)}, lse {tuple(lse.shape)}"
        raise ValueError(f"merge_partials: {shapes}; expected out [N, T, H, D] and lse [N, T, H]")
    merged_lse = lse.logsumexp(0)
    merged = weigh_partial(out, lse, merged_lse).sum(0)
    return merged.to(out.dtype), merged_lse


def weigh_partial(out: Tensor, lse: Tensor, merged_lse: Tensor) -> Tensor:
    """A part's share of the merged output: the shares of all parts add up to it.

    Args:
        out: [..., D], any float dtype.
        lse: [...] float32 of the part.
        merged_lse: [...] float32 over all parts, broadcastable to lse.
    Returns:
        [..., D] in float32 (float64 stays); zeros where the part is empty.
    """
    # -inf - -inf is NaN: a row that is empty everywhere takes weight 0 as well.
    weight = torch.exp(lse - merged_lse).where(lse > -torch.inf, 0.0).unsqueeze(-1)
    out = out.to(torch.promote_types(out.dtype, torch.float32))
    return (out * weight).where(weight > 0, 0.0)  # 0 x NaN is NaN: the product alone would let an empty row's payload through
