"""Triton kernel of the cache with its launcher; the indexing of `cache/latent.py` specifies it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 4  # of one program


@triton.jit(do_not_specialize=["num_rows"])
def read_kernel(
    cache_ptr,
    slots_ptr,
    out_ptr,
    num_rows,
    block_size,
    stride_block,
    stride_row,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A program copies ROWS rows."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    slot = tl.load(slots_ptr + row, mask=row < num_rows, other=0)
    from_row = slot // block_size * stride_block + slot % block_size * stride_row
    column = tl.arange(0, COLUMNS)[None, :]
    mask = (row < num_rows)[:, None] & (column < WIDTH)
    tl.store(out_ptr + row[:, None] * WIDTH + column, tl.load(cache_ptr + from_row[:, None] + column, mask=mask), mask=mask)


def read_rows(kv_cache: Tensor, slots: Tensor) -> Tensor:
    """`cache.latent.read_latents` in one kernel."""
    num_rows, width = len(slots), kv_cache.shape[-1]
    out = torch.empty(num_rows, width, dtype=kv_cache.dtype, device=kv_cache.device)
    read_kernel[(triton.cdiv(num_rows, _ROWS),)](
        kv_cache,
        slots.contiguous(),
        out,
        num_rows,
        kv_cache.shape[1],
        *kv_cache.stride()[:2],
        WIDTH=width,
        ROWS=_ROWS,
        COLUMNS=triton.next_power_of_2(width),
    )
    return out
