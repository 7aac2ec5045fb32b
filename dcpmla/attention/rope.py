"""Positions in queries and keys: rotary embedding in both layouts, and Llama 4's length-dependent query factor."""

import torch
from torch import Tensor


def apply_rope(x: Tensor, cos_sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the last dim by each token's angles, in float32.

    Args:
        x: Values [T, R] or [T, h, R], any float dtype.
        cos_sin: Angles [T, R] float32, R / 2 cosines then R / 2 sines, times YaRN's factor, if any.
        interleaved: Whether pairs are (2i, 2i+1), GPT-J's layout; else (i, i + R/2), NeoX's.
    Returns:
        A tensor of x's shape and dtype, pairs in their columns.
    Source: RoFormer; the two layouts as in GPT-J and GPT-NeoX.
    """
    cos, sin = cos_sin.view(x.shape[0], *(1,) * (x.ndim - 2), x.shape[-1]).chunk(2, -1)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    first, second = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    rotated = first * cos - second * sin, second * cos + first * sin
    return (torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)).to(x.dtype)


def llama_4_factor(positions: Tensor, beta: float, original_max_position: int) -> Tensor:
    """Return the query's factor [T] float32 at positions [T]: 1 + beta ln(1 + floor(position / original_max_position)).

    Source: Llama 4's attention temperature, as Mistral 4 uses it.
    """
    return 1 + beta * torch.log1p(torch.floor(positions / original_max_position))


def query_factor(positions: Tensor, llama_4_scaling: tuple[float, int] | None, dtype: torch.dtype) -> Tensor | None:
    """Return the factor of a step's queries: `llama_4_factor` [T] in their dtype; None for a model without it.

    Source: transformers' Mistral 4 rounds the factor before the product.
    """
    return None if llama_4_scaling is None else llama_4_factor(positions, *llama_4_scaling).to(dtype)
