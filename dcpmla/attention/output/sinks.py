"""Attention sinks: a learned logit for each head that takes probability and gives no value.

A sink only scales a head's output, by a function of the LSE of its scores. So attention and merges know nothing of
sinks, and each token's output is scaled once, after the merge over all ranks and chunks.
"""

import torch
from torch import Tensor

from dcpmla.operators import operator


@operator(
    "apply_sinks",
    kernel="dcpmla.attention.triton.sinks:apply_sinks",
    fake=lambda out, *_: out.new_empty(out.shape),
    runs=lambda out, *_: out.is_cuda and out.dtype != torch.float64,
)
def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return attention's output with the sinks in its denominators. A custom op.

    Args:
        out: [T, h, D], merged, any float dtype. Rows with lse -inf are ignored, even if they hold NaN.
        lse: [T, h] float32, natural log, without the sinks.
        sinks: [h] float32.
    Returns:
        [T, h, D] in the dtype of out, contiguous: out times sigmoid(lse - sink), in float32 at least, rounded once.
    Source: gpt-oss; transformers' hy_v4.
    """
    share = torch.sigmoid(lse - sinks)[..., None]
    wide = out.to(torch.promote_types(out.dtype, torch.float32))
    return (wide * share).where(share > 0, 0.0).to(out.dtype).contiguous()
