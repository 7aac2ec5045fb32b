"""Factors of queries that grow with their positions, with two learned numbers for each head (Mistral Large 4)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dcpmla.operators import operator
from dcpmla.parallel.linear import Weight, fill, read_weight


def log_positions(positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ln(p + 1) at positions p [T], rounded to the model's dtype as in transformers' Mistral Large 4."""
    return (positions + 1).float().log().to(dtype)


@operator(
    "scale_queries",
    kernel="dcpmla.attention.triton.head_factors:scale_queries",
    fake=lambda q, _logs, _scale, _bias, padding: q.new_empty(*q.shape[:2], q.shape[2] + padding),
)
def scale_queries(q: Tensor, logs: Tensor, scale: Tensor, bias: Tensor, padding: int) -> Tensor:
    """Return queries times their heads' factors, with columns of zeros after each.

    Args:
        q: Queries [T, n, D] with contiguous columns.
        logs: Logarithms of the tokens' positions [T] (`log_positions`), in the dtype of q.
        scale, bias: Numbers of each head's factor, scale ln(p + 1) + bias, [n] in the dtype of q.
        padding: Number of columns of zeros.
    Returns:
        [T, n, D + padding] in new memory.
    Source: transformers' Mistral Large 4, which rounds scale ln(p + 1), the factor, and the product.
    """
    factors = logs[:, None] * scale + bias
    return F.pad(q * factors[..., None], (0, padding))


class HeadFactors(nn.Module):
    """The factors scale ln(p + 1) + bias of queries at positions p. Every rank holds both numbers of all heads.

    Args:
        num_heads: Number of heads of the model, or of its indexer.
        new: Keyword arguments of parameters, which are uninitialized until `load_weights`.
    """

    def __init__(self, num_heads: int, **new: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(num_heads, **new))
        self.bias = nn.Parameter(torch.empty(num_heads, **new))

    def forward(self, q: Tensor, logs: Tensor | None, heads: slice = slice(None), padding: int = 0) -> Tensor:
        """Return queries [T, n, D] of some heads times their factors (`scale_queries`)."""
        assert logs is not None  # `StepMetadata.check` compares it with the config
        return scale_queries(q, logs, self.scale[heads], self.bias[heads], padding)

    def load_weights(self, weights: Mapping[str, Weight]) -> None:
        """Read both numbers of all heads from "softmax_scaling.scale" and "softmax_scaling.bias"."""
        fill(self.scale, read_weight(weights, "softmax_scaling.scale", tuple(self.scale.shape)))
        fill(self.bias, read_weight(weights, "softmax_scaling.bias", tuple(self.bias.shape)))
