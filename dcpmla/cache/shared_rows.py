"""Rows of shared keys (DeepSeek-V4), which are values, too: their cache and its formats, byte by byte, in plain torch.

A cache is a tensor of rows numbered from 0, tokens of a window and compressed entries alike. Its dtype says
its format:

- the model's own: rows [D] as they are; [num_rows, 1, D].
- torch.uint8 (`fp8_ds_mla`): pages of 64 rows. A page holds the data of all its rows, then their scales: D - 64 values
  as e4m3 and the last 64, which are rotated, in bfloat16; a scale for each 64 values of e4m3, 2^(byte - 127), padded to
  8 bytes. 584 bytes a row with D = 512; pages are padded to whole multiples of the data of a row (37,440 bytes).
  [num_pages, 64, page bytes / 64]. Source: vLLM's and FlashMLA's layout for DeepSeek-V4.
"""

import math

import torch
from torch import Tensor

from dcpmla.cache.formats import FP8, FP8_MAX
from dcpmla.operators import operator

PAGE_ROWS = 64
ROPE_DIM = 64  # columns that stay in bfloat16
TILE = 64  # values that share a scale
SCALE_BYTES = 8  # of a row
SMALLEST_AMAX = 1e-4  # so that zeros have a scale, too
_BIAS = 127  # of an exponent in a byte


def rows_shape(num_rows: int, head_dim: int, storage: torch.dtype) -> tuple[int, int, int]:
    """Return the shape of a cache of at least so many rows.

    Raises:
        ValueError: fp8_ds_mla for rows of a width that it cannot hold.
    """
    if storage != torch.uint8:
        return num_rows, 1, head_dim
    num_tiles, rest = divmod(head_dim - ROPE_DIM, TILE)
    if rest or not 0 < num_tiles <= SCALE_BYTES:
        raise ValueError(
            f"kv_cache_dtype (--kv-cache-dtype) fp8_ds_mla takes rows of {ROPE_DIM} rotated values after 1 to "
            f"{SCALE_BYTES} times {TILE}; head_dim is {head_dim}"
        )
    data = data_bytes(head_dim)
    page_bytes = -(-PAGE_ROWS * (data + SCALE_BYTES) // math.lcm(data, PAGE_ROWS)) * math.lcm(data, PAGE_ROWS)
    return -(-num_rows // PAGE_ROWS), PAGE_ROWS, page_bytes // PAGE_ROWS


def data_bytes(head_dim: int) -> int:
    """Return the bytes of a row of fp8_ds_mla without its scales."""
    return head_dim - ROPE_DIM + 2 * ROPE_DIM


def write_rows(cache: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Store rows [N, D] at slots [N] int64; those with slot -1 are skipped."""
    mine = slots >= 0
    slots, rows = slots[mine], rows[mine]
    if cache.dtype != torch.uint8:
        cache[slots, 0] = rows.to(cache.dtype)
        return
    codes, scales, rope = to_fp8_rows(rows)
    data = torch.cat([codes.view(torch.uint8), rope.view(torch.uint8)], -1)
    data_plane, scale_plane = _planes(cache, rows.shape[1])
    page, offset = slots // PAGE_ROWS, slots % PAGE_ROWS
    data_plane[page, offset] = data
    scale_plane[page, offset] = torch.nn.functional.pad(scales, (0, SCALE_BYTES - scales.shape[1]))


@operator("read_shared_rows")
def read_rows(cache: Tensor, slots: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Return rows [..., D] in `dtype` at slots [...] int64. A custom op."""
    if cache.is_cuda and dtype != torch.float64:
        from dcpmla.cache import kernels  # triton is there on Linux only

        return kernels.read_shared_rows(cache, slots, head_dim, dtype)
    if cache.dtype != torch.uint8:
        return cache[slots, 0].to(dtype)
    data_plane, scale_plane = _planes(cache, head_dim)
    page, offset = slots // PAGE_ROWS, slots % PAGE_ROWS
    data, scales = data_plane[page, offset], scale_plane[page, offset]
    nope = head_dim - ROPE_DIM
    wide = torch.promote_types(dtype, torch.float32)
    exponents = scales[..., : nope // TILE].to(torch.int32) - _BIAS
    tiles = data[..., :nope].contiguous().view(FP8).to(wide).unflatten(-1, (-1, TILE))
    values = torch.ldexp(tiles, exponents[..., None]).flatten(-2)
    rope = data[..., nope:].contiguous().view(torch.bfloat16)
    return torch.cat([values.to(dtype), rope.to(dtype)], -1)


@read_rows.register_fake
def _(cache: Tensor, slots: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    return cache.new_empty(*slots.shape, head_dim, dtype=dtype)


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
    return codes, (exponent + _BIAS).clamp(0, 255).to(torch.uint8), rope


def _planes(cache: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return views of a cache's data [num_pages, 64, data bytes] and scales [num_pages, 64, 8]."""
    data, pages = data_bytes(head_dim), cache.flatten(1)
    return (
        pages[:, : PAGE_ROWS * data].unflatten(1, (PAGE_ROWS, data)),
        pages[:, PAGE_ROWS * data : PAGE_ROWS * (data + SCALE_BYTES)].unflatten(1, (PAGE_ROWS, SCALE_BYTES)),
    )
