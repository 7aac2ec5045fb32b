"""Weights in another order of rows or in another format, with the same values."""

import torch
from torch import Tensor, nn

from dcpmla.parallel.formats import BLOCK, GROUP, AnyWeight, Quantized, dequantize, from_e8m0, is_block_fp8, spread


def reorder_rows(weight: AnyWeight, order: Tensor) -> AnyWeight:
    """Return a matrix with the rows of every head in another order; in fp8 if all rows stay in their block, or have
    scales of their own.
    """

    def reorder(x: Tensor) -> Tensor:
        rows = x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x  # whose rows torch cannot index
        return rows.unflatten(0, (-1, len(order)))[:, order].flatten(0, 1).view(x.dtype)

    if isinstance(weight, Quantized) and not is_block_fp8(weight):
        return weight.map(reorder)
    if isinstance(weight, Quantized) and BLOCK % len(order) == 0:
        return weight._replace(codes=reorder(weight.codes))
    return reorder(dequantize(weight, torch.float32) if isinstance(weight, Quantized) else weight)


def to_block_fp8(weight: Quantized) -> Quantized | None:
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
    values = dequantize(Quantized(weight.codes, (shifts + 127).clamp(0, 254).to(torch.uint8)), torch.float32)
    codes = values.to(torch.float8_e4m3fn)
    return Quantized(codes, from_e8m0(base.to(torch.uint8))) if torch.equal(codes.float(), values) else None
