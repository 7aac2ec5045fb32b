"""Triton kernel that reads rows of shared keys, with its launcher; `cache/shared_rows.py` specifies it.

`kernels.store_shared` writes such rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dcpmla.cache.kernels import PAGE_ROPE, PAGE_ROWS, PAGE_SCALE_BYTES, PAGE_TILE, read_cache_rows

_ROWS = 8  # rows per program


@triton.jit(do_not_specialize=["num_rows"])
def read_pages_kernel(
    cache_ptr,
    slots_ptr,
    out_ptr,
    num_rows,
    stride_page,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Dequantize ROWS rows of fp8_ds_mla per program."""
    NOPE: tl.constexpr = WIDTH - PAGE_ROPE
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    is_row = row < num_rows
    slot = tl.load(slots_ptr + row, mask=is_row, other=0)
    page_ptr = cache_ptr + slot // PAGE_ROWS * stride_page
    data_ptr = page_ptr + slot % PAGE_ROWS * (NOPE + 2 * PAGE_ROPE)
    scale_ptr = page_ptr + PAGE_ROWS * (NOPE + 2 * PAGE_ROPE) + slot % PAGE_ROWS * PAGE_SCALE_BYTES
    column, tile = tl.arange(0, COLUMNS)[None, :], tl.arange(0, COLUMNS // PAGE_TILE)[None, :]
    codes = tl.load(data_ptr + column, mask=is_row & (column < NOPE), other=0)
    exponents = tl.load(scale_ptr + tile, mask=is_row & (tile < NOPE // PAGE_TILE), other=0)
    scales = (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    tiles = tl.reshape(codes.to(tl.float8e4nv, bitcast=True).to(tl.float32), [ROWS, COLUMNS // PAGE_TILE, PAGE_TILE])
    values = tl.reshape(tiles * scales[:, :, None], [ROWS, COLUMNS])
    is_rope = (column >= NOPE) & (column < WIDTH)
    rope_ptr = (data_ptr + NOPE).to(tl.pointer_type(tl.bfloat16)) + (column - NOPE)
    values = tl.where(is_rope, tl.load(rope_ptr, mask=is_row & is_rope, other=0.0).to(tl.float32), values)
    tl.store(out_ptr + row * WIDTH + column, values.to(out_ptr.dtype.element_ty), mask=is_row & (column < WIDTH))


def read_shared_rows(cache: Tensor, slots: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Compute `cache.shared_rows.read_rows` in one kernel."""
    if cache.dtype != torch.uint8:
        return read_cache_rows(cache, slots.flatten()).to(dtype).view(*slots.shape, head_dim)
    out = torch.empty(*slots.shape, head_dim, dtype=dtype, device=cache.device)
    if slots.numel():
        read_pages_kernel[(triton.cdiv(slots.numel(), _ROWS),)](
            cache,
            slots.contiguous(),
            out,
            slots.numel(),
            cache.stride(0),
            WIDTH=head_dim,
            ROWS=_ROWS,
            COLUMNS=triton.next_power_of_2(head_dim),
        )
    return out
