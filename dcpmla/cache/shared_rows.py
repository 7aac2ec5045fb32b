"""Rows of shared keys (`cache/shared_format.py`), written and read by slot, in plain torch."""

import torch
from torch import Tensor

from dcpmla.cache.formats import FP8, FP8_MAX, planes
from dcpmla.cache.shared_format import EXPONENT_BIAS, PAGE_ROWS, ROPE_DIM, SCALE_BYTES, SMALLEST_AMAX, TILE, data_bytes
from dcpmla.operators import operator


def write_rows(cache: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Store rows [N, D] at slots [N] int64; skip rows with slot -1."""
    mine = slots >= 0
    slots, rows = slots[mine], rows[mine]
    if cache.dtype != torch.uint8:
        cache[slots, 0] = rows.to(cache.dtype)
        return
    codes, scales, rope = to_fp8_rows(rows)
    data = torch.cat([codes.view(torch.uint8), rope.view(torch.uint8)], -1)
    data_plane, scale_plane = planes(cache, PAGE_ROWS, data.shape[1], SCALE_BYTES)
    page, offset = slots // PAGE_ROWS, slots % PAGE_ROWS
    data_plane[page, offset] = data
    scale_plane[page, offset] = torch.nn.functional.pad(scales, (0, SCALE_BYTES - scales.shape[1]))


@operator(
    "read_shared_rows",
    kernel="dcpmla.cache.shared_kernels:read_shared_rows",
    fake=lambda cache, slots, head_dim, dtype: cache.new_empty(*slots.shape, head_dim, dtype=dtype),
    runs=lambda cache, _slots, _head_dim, dtype: cache.is_cuda and dtype != torch.float64,
)
def read_rows(cache: Tensor, slots: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Return rows [..., D] in `dtype` at slots [...] int64. A custom op."""
    if cache.dtype != torch.uint8:
        return cache[slots, 0].to(dtype)
    data_plane, scale_plane = planes(cache, PAGE_ROWS, data_bytes(head_dim), SCALE_BYTES)
    page, offset = slots // PAGE_ROWS, slots % PAGE_ROWS
    data, scales = data_plane[page, offset], scale_plane[page, offset]
    nope = head_dim - ROPE_DIM
    wide = torch.promote_types(dtype, torch.float32)
    exponents = scales[..., : nope // TILE].to(torch.int32) - EXPONENT_BIAS
    tiles = data[..., :nope].contiguous().view(FP8).to(wide).unflatten(-1, (-1, TILE))
    values = torch.ldexp(tiles, exponents[..., None]).flatten(-2)
    rope = data[..., nope:].contiguous().view(torch.bfloat16)
    return torch.cat([values.to(dtype), rope.to(dtype)], -1)


def to_fp8_rows(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize rows [N, D], rounded to bfloat16 first.

    Returns:
        e4m3 [N, D - 64]; exponents of the scales uint8 [N, (D - 64) / 64], each the smallest without saturation; the
        last columns bfloat16 [N, 64].
    Source: 2^ceil(log2(max(amax, 1e-4) / 448)), DeepSeek-V4's reference code.
    """
    rows = rows.to(torch.bfloat16)
    values, rope = rows[:, :-ROPE_DIM], rows[:, -ROPE_DIM:].contiguous()
    tiles = values.float().unflatten(-1, (-1, TILE))
    mantissa, exponent = torch.frexp(tiles.abs().amax(-1).clamp(min=SMALLEST_AMAX) / FP8_MAX)
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    codes = torch.ldexp(tiles, -exponent[..., None]).to(FP8).flatten(-2)
    return codes, (exponent + EXPONENT_BIAS).clamp(0, 255).to(torch.uint8), rope
