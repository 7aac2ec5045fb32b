"""The formats of rows of shared keys (DeepSeek-V4), which are values, too, byte by byte.

A cache is a tensor of rows numbered from 0, both tokens of a window and compressed entries. Its dtype sets its format:

- the model's own: rows [D] unchanged; [num_rows, 1, D].
- torch.uint8 (`fp8_ds_mla`): pages of 64 rows. A page holds the data of all its rows, then their scales: D - 64 values
  as e4m3 and the last 64, which are rotated, in bfloat16; a scale for each 64 values of e4m3, 2^(byte - 127), padded to
  8 bytes. 584 bytes a row with D = 512; pages are padded to whole multiples of the data of a row (37,440 bytes).
  [num_pages, 64, page bytes / 64]. Source: vLLM's and FlashMLA's layout for DeepSeek-V4.
"""

import math

import torch
from torch import Tensor

from dcpmla.cache.formats import planes
from dcpmla.cache.items import Items

PAGE_ROWS = 64
ROPE_DIM = 64  # columns that stay in bfloat16
TILE = 64  # values that share a scale
SCALE_BYTES = 8  # bytes of a row's scales
SMALLEST_AMAX = 1e-4  # gives zeros a scale, too
EXPONENT_BIAS = 127  # added to an exponent to make a byte


def rows_shape(num_rows: int, head_dim: int, storage: torch.dtype) -> tuple[int, int, int]:
    """Return the shape of a cache of at least `num_rows` rows.

    Raises:
        ValueError: The format is fp8_ds_mla, which cannot hold rows of this width.
    """
    if storage != torch.uint8:
        return num_rows, 1, head_dim
    num_tiles, remainder = divmod(head_dim - ROPE_DIM, TILE)
    if remainder or not 0 < num_tiles <= SCALE_BYTES:
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


def row_items(rows: Tensor, head_dim: int, first_row: int) -> dict[str, Items]:
    """Return the rows of a cache of rows as items, from first_row on, by the names of their planes."""
    if rows.dtype != torch.uint8:
        return {"rows": Items.in_pages(rows, first_row=first_row)}
    data, scales = planes(rows, PAGE_ROWS, data_bytes(head_dim), SCALE_BYTES)
    return {"data": Items.in_pages(data, first_row=first_row), "scales": Items.in_pages(scales, first_row=first_row)}
