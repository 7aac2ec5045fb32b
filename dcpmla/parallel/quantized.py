"""Weights in 8 and 4 bits, as checkpoints ship them, and the values that they stand for."""

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 128  # rows and columns that share a scale in block-quantized fp8
FP4_GROUP = 32  # columns that share a scale in 4 bits
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the lower three bits of a code; the fourth is the sign


class BlockFp8(NamedTuple):
    """A matrix [.., N, K] in e4m3 with a scale per block of 128 x 128, as DeepSeek-V3 ships it.

    Attributes:
        codes: e4m3 [.., N, K].
        scales: float32 [.., ceil(N / 128), ceil(K / 128)]; a value is its code's times its block's scale.
    """

    codes: Tensor
    scales: Tensor


class GroupFp4(NamedTuple):
    """A matrix [.., N, K] in e2m1 with a scale per 32 columns of a row, as DeepSeek-V4 ships its experts.

    Attributes:
        codes: uint8 [.., N, K / 2], two codes a byte, the even column in the lower half.
        scales: uint8 [.., N, K / 32], e8m0: a value is its code's times 2^(scale - 127).
    """

    codes: Tensor
    scales: Tensor


AnyWeight = Tensor | BlockFp8 | GroupFp4


def dequantize(weight: AnyWeight, dtype: torch.dtype) -> Tensor:
    """Return the values [.., N, K] of a weight, products in float32, rounded once."""
    if isinstance(weight, Tensor):
        return weight.to(dtype)
    if isinstance(weight, GroupFp4):
        codes = torch.stack([weight.codes & 15, weight.codes >> 4], -1).flatten(-2).int()
        sizes = torch.tensor(_E2M1, device=codes.device)[codes & 7]
        values = torch.where(codes >= 8, -sizes, sizes).unflatten(-1, (-1, FP4_GROUP))
        scales = torch.ldexp(torch.ones((), device=codes.device), weight.scales.int() - 127)
        return (values * scales[..., None]).flatten(-2).to(dtype)
    num_rows, num_cols = weight.codes.shape[-2:]
    scales = weight.scales.repeat_interleave(BLOCK, -2)[..., :num_rows, :]
    return (weight.codes.float() * scales.repeat_interleave(BLOCK, -1)[..., :num_cols]).to(dtype)
