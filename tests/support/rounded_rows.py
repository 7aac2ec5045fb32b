"""Rows of DeepSeek-V4's kind as caches of fp8_ds_mla hold them, in models without caches."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dcpmla.cache.shared_format import rows_shape
from dcpmla.cache.shared_rows import read_rows, write_rows


def rounding(rotate: Callable[..., Tensor], is_row: Callable[[Tensor], bool]) -> Callable[..., Tensor]:
    """Return a function that rotates as another, and rounds what is a row of a cache."""

    def rotate_and_round(x: Tensor, *angles: Any) -> Tensor:
        rotated = rotate(x, *angles)
        return _rounded(rotated.float()).to(rotated.dtype) if is_row(x) else rotated

    return rotate_and_round


def _rounded(rows: Tensor) -> Tensor:
    flat = rows.flatten(0, -2)
    cache, slots = torch.zeros(rows_shape(*flat.shape, torch.uint8), dtype=torch.uint8), torch.arange(len(flat))
    write_rows(cache, flat, slots)
    return read_rows(cache, slots, flat.shape[1], rows.dtype).view(rows.shape)
