"""Merging of attention over parts of the keys by the log-sum-exp (LSE) of each part's scores.

The reduction of Flash-Decoding. LSE is natural log; a part without keys has lse -inf and weight zero; its rows are
ignored.
"""

import torch
from torch import Tensor


def merge_partials(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge partial attention over disjoint sets of keys.

    Args:
        out: Outputs [N, T, H, D] of N parts, with H heads of D columns, any float dtype. Rows whose lse is -inf are
            ignored, even if they hold NaN.
        lse: Log-sum-exp [N, T, H], float32, natural log.
    Returns:
        Merged out [T, H, D] in its dtype, and lse [T, H] float32; zeros and -inf where all parts are empty. Sums are in
        float32 at least.
    Raises:
        ValueError: The shapes of `out` and `lse` do not match.
    Source: the reduction of Flash-Decoding (online softmax).
    """
    if out.ndim != 4 or out.shape[:-1] != lse.shape:
        shapes = f"out has shape {tuple(out.shape)}, lse {tuple(lse.shape)}"
        raise ValueError(f"merge_partials: {shapes}; expected out [N, T, H, D] and lse [N, T, H]")
    merged = weigh_partial(out, partial_weights(lse)).sum(0)
    return merged.to(out.dtype), lse.logsumexp(0)


def merge_tree(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge partial attention in a fixed order: part i with part i + N / 2, until one is left. Other numbers of parts
    than powers of two are merged as if empty parts made them one.

    So merging the lanes of each rank first (`ownership.NUM_TILE_LANES`) and then the ranks gives the same bits for any
    number of ranks. An empty part leaves the bits of the other unchanged.

    Args:
        out: Outputs [N, ..., D] float32 of N parts, at least 2. Rows whose lse is -inf are ignored.
        lse: Log-sum-exp [N, ...], float32, natural log.
    Returns:
        Merged out [..., D] and lse [...], float32; zeros and -inf where all parts are empty.
    """
    while (num := len(out)) > 1:
        half = 1 << (num - 1).bit_length() - 1
        merged, merged_lse = merge_pair(out[: num - half], lse[: num - half], out[half:], lse[half:])
        out, lse = torch.cat([merged, out[num - half : half]]), torch.cat([merged_lse, lse[num - half : half]])
    return out[0], lse[0]


def merge_pair(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two parts: out and other [..., D] float32 by lse and other_lse [...] float32."""
    peak = torch.maximum(lse, other_lse)
    shift = peak.where(peak != -torch.inf, 0.0)  # -inf - -inf is NaN
    # Contiguous factors: torch computes strided elements by other code, which may round otherwise.
    weight, other_weight = ((each - shift).contiguous().exp() for each in (lse, other_lse))
    total = weight + other_weight
    divisor = total.where(total != 0, 1.0)
    merged = weigh_partial(out, weight) + weigh_partial(other, other_weight)
    return merged / divisor[..., None], (divisor.log() + shift).where(total != 0, -torch.inf)


def partial_weights(lse: Tensor) -> Tensor:
    """Compute each part's weight in the merged output from lse [N, ...]; they add up to 1, or to 0 if all are empty."""
    return lse.softmax(0).where(lse != -torch.inf, 0.0)  # the softmax over empty parts alone is NaN


def weigh_partial(out: Tensor, weight: Tensor) -> Tensor:
    """Multiply a part's rows [..., D] by its weights [...], in float32 at least; the results add up to the output."""
    weight = weight.unsqueeze(-1)
    out = out.to(torch.promote_types(out.dtype, torch.float32))
    return (out * weight).where(weight != 0, 0.0)  # an empty row may hold NaN, and 0 x NaN is NaN
