"""Weights in another order of rows or in another format, with the same values."""

import torch
from torch import Tensor, nn

from dcpmla.parallel.quantized import (
    BLOCK,
    GROUP,
    AnyWeight,
    BlockFp8,
    GroupFp4,
    GroupFp8,
    dequantize,
    from_e8m0,
    spread,
)


def reorder_rows(weight: AnyWeight, order: Tensor) -> AnyWeight:
    """Return a matrix with the rows of every head in another order; in fp8 if all rows stay in their block, or have
    scales of their own.
    """
    if isinstance(weight, BlockFp8) and BLOCK % len(order) == 0:
        return BlockFp8(_reorder(weight.codes.view(torch.uint8), order).view(weight.codes.dtype), weight.scales)
    if isinstance(weight, GroupFp8):
        codes = _reorder(weight.codes.view(torch.uint8), order).view(weight.codes.dtype)
        return GroupFp8(codes, _reorder(weight.scales, order))
    return _reorder(weight if isinstance(weight, Tensor) else dequantize(weight, torch.float32), order)


def _reorder(x: Tensor, order: Tensor) -> Tensor:
    return x.unflatten(0, (-1, len(order)))[:, order].flatten(0, 1)


def to_block_fp8(weight: GroupFp4) -> BlockFp8 | None:
    """Return a matrix of the same values in e4m3, or None if a block of 128 x 128 has no scale that represents all its
    values exactly.

    The scale puts the largest of a block's groups at 6 x 2^6 = 384 of e4m3's 448. A group may then have a scale 2^14
    times as small: e2m1's 0.5 is 2^-9 there, e4m3's smallest number. Groups of zeros may have any scale.

    Source: DeepSeek-V4's conversion for experts in fp8 (inference/convert.py).
    """
    groups_a_block = BLOCK // GROUP
    is_zero = (weight.codes & 0x77).unflatten(-1, (-1, GROUP // 2)).amax(-1) == 0
    exponents = weight.scales.int().masked_fill(is_zero, 0)
    padding = (0, -exponents.shape[-1] % groups_a_block, 0, -exponents.shape[-2] % BLOCK)
    blocks = nn.functional.pad(exponents, padding).unflatten(-1, (-1, groups_a_block)).unflatten(-3, (-1, BLOCK))
    base = (blocks.amax((-3, -1)) - 6).clamp(min=1)  # the exponent of float32's smallest normal number
    shifts = exponents - spread(base, BLOCK, groups_a_block, exponents)
    values = dequantize(GroupFp4(weight.codes, (shifts + 127).clamp(0, 254).to(torch.uint8)), torch.float32)
    codes = values.to(torch.float8_e4m3fn)
    return BlockFp8(codes, from_e8m0(base.to(torch.uint8))) if torch.equal(codes.float(), values) else None
