"""Triton kernels of the cache with their launchers; `cache/formats.py` and `cache/latent.py` specify them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dcpmla.cache import formats

_COPIED_ROWS, _DEQUANTIZED_ROWS = 4, 8  # of one program
FP8_MAX = tl.constexpr(formats.FP8_MAX)
TILE = tl.constexpr(formats.TILE)
_SMALLEST_SCALE = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit
def to_fp8(x, scale):
    """Compute `formats.to_fp8`."""
    x = tl.div_rn(x.to(tl.float32), scale)
    return tl.clamp(x, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.jit
def quantize(x, scale_ptr):
    """Convert x to e4m3 where there is a scale; else return it unchanged."""
    if scale_ptr is not None:
        x = to_fp8(x, tl.load(scale_ptr))
    return x


@triton.jit
def store_kv_c(row_ptr, kv_c, scale_ptr, RANK: tl.constexpr, COLUMNS: tl.constexpr):
    """Store a latent [COLUMNS], RANK of them real, at the head of its cache row; the pointer's type says the format."""
    column = tl.arange(0, COLUMNS)
    mask = column < RANK
    if row_ptr.dtype.element_ty == tl.uint8:
        tiles = tl.reshape(kv_c.to(tl.float32), [COLUMNS // TILE, TILE])
        scales = tl.maximum(tl.div_rn(tl.max(tl.abs(tiles), 1), FP8_MAX), _SMALLEST_SCALE)
        codes = tl.reshape(to_fp8(tiles, scales[:, None]), [COLUMNS])
        tl.store(row_ptr + column, codes.to(tl.uint8, bitcast=True), mask=mask)
        tile = tl.arange(0, COLUMNS // TILE)
        tl.store((row_ptr + RANK).to(tl.pointer_type(tl.float32)) + tile, scales, mask=tile < RANK // TILE)
    else:
        tl.store(row_ptr + column, quantize(kv_c, scale_ptr), mask=mask)


@triton.jit
def k_pe_of(row_ptr, RANK: tl.constexpr):
    """Return a pointer to the rope part of a cache row, in the type of its elements."""
    k_pe_ptr = row_ptr + RANK
    if row_ptr.dtype.element_ty == tl.uint8:
        k_pe_ptr = (k_pe_ptr + RANK // TILE * 4).to(tl.pointer_type(tl.bfloat16))
    return k_pe_ptr


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
    """Copy ROWS rows per program."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    slot = tl.load(slots_ptr + row, mask=row < num_rows, other=0)
    from_row = slot // block_size * stride_block + slot % block_size * stride_row
    column = tl.arange(0, COLUMNS)[None, :]
    mask = (row < num_rows)[:, None] & (column < WIDTH)
    tl.store(
        out_ptr + row[:, None] * WIDTH + column, tl.load(cache_ptr + from_row[:, None] + column, mask=mask), mask=mask
    )


def read_rows(kv_cache: Tensor, slots: Tensor) -> Tensor:
    """Compute `cache.latent.read_latents` in one kernel."""
    num_rows, width = len(slots), kv_cache.shape[-1]
    out = torch.empty(num_rows, width, dtype=kv_cache.dtype, device=kv_cache.device)
    read_kernel[(triton.cdiv(num_rows, _COPIED_ROWS),)](
        kv_cache,
        slots.contiguous(),
        out,
        num_rows,
        kv_cache.shape[1],
        *kv_cache.stride()[:2],
        WIDTH=width,
        ROWS=_COPIED_ROWS,
        COLUMNS=triton.next_power_of_2(width),
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def dequantize_kernel(
    rows_ptr,
    scale_ptr,
    out_ptr,
    num_rows,
    stride_row,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    ROWS: tl.constexpr,
    RANK_COLUMNS: tl.constexpr,
    ROPE_COLUMNS: tl.constexpr,
):
    """Dequantize ROWS rows per program."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column, rope_column = tl.arange(0, RANK_COLUMNS)[None, :], tl.arange(0, ROPE_COLUMNS)[None, :]
    is_row = row < num_rows
    mask, rope_mask = is_row & (column < RANK), is_row & (rope_column < ROPE)
    rows_ptr += row * stride_row
    out_ptr += row * (RANK + ROPE)
    kv_c = tl.load(rows_ptr + column, mask=mask)
    k_pe = tl.load(k_pe_of(rows_ptr, RANK) + rope_column, mask=rope_mask).to(tl.float32)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr)
        kv_c, k_pe = kv_c.to(tl.float32) * scale, k_pe * scale
    else:
        tile = tl.arange(0, RANK_COLUMNS // TILE)[None, :]
        scales = tl.load((rows_ptr + RANK).to(tl.pointer_type(tl.float32)) + tile, mask=is_row & (tile < RANK // TILE))
        tiles = tl.reshape(kv_c.to(tl.float8e4nv, bitcast=True).to(tl.float32), [ROWS, RANK_COLUMNS // TILE, TILE])
        kv_c = tl.reshape(tiles * scales[:, :, None], [ROWS, RANK_COLUMNS])
    tl.store(out_ptr + column, kv_c.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out_ptr + RANK + rope_column, k_pe.to(out_ptr.dtype.element_ty), mask=rope_mask)


def dequantize_rows(rows: Tensor, kv_lora_rank: int, kv_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Compute `cache.latent.dequantize_rows` in one kernel."""
    formats.check_kv_scale(rows.dtype, kv_scale)
    rope = formats.rope_dim_of(rows.shape[1], rows.dtype, kv_lora_rank)
    out = torch.empty(len(rows), kv_lora_rank + rope, dtype=dtype, device=rows.device)
    dequantize_kernel[(triton.cdiv(len(rows), _DEQUANTIZED_ROWS),)](
        rows,
        kv_scale,
        out,
        len(rows),
        rows.stride(0),
        RANK=kv_lora_rank,
        ROPE=rope,
        ROWS=_DEQUANTIZED_ROWS,
        RANK_COLUMNS=triton.next_power_of_2(kv_lora_rank),
        ROPE_COLUMNS=triton.next_power_of_2(rope),
    )
    return out
