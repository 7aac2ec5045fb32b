"""Triton kernels of the cache with their launchers; `cache/formats.py` and `attention/mla/prefill.py` specify them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dcpmla.cache import formats, shared_format

_COPIED_ROWS, _DEQUANTIZED_ROWS = 4, 8  # rows per program
FP8_MAX = tl.constexpr(formats.FP8_MAX)
TILE = tl.constexpr(formats.TILE)
PAGE_ROWS = tl.constexpr(shared_format.PAGE_ROWS)
PAGE_ROPE = tl.constexpr(shared_format.ROPE_DIM)
PAGE_TILE = tl.constexpr(shared_format.TILE)
PAGE_SCALE_BYTES = tl.constexpr(shared_format.SCALE_BYTES)
_SMALLEST_AMAX = tl.constexpr(shared_format.SMALLEST_AMAX)
_SMALLEST_SCALE = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit
def to_fp8(x, scale):
    """Compute `formats.to_fp8`."""
    x = tl.div_rn(x.to(tl.float32), scale)
    return tl.clamp(x, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.jit
def power_of_two_scale(amax, SMALLEST):
    """Return the smallest power of two by which values up to amax, or SMALLEST, do not saturate e4m3."""
    bits = tl.div_rn(tl.maximum(amax, SMALLEST), FP8_MAX).to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def quantize_pairs(x, y, SMALLEST, TILE_PAIRS: tl.constexpr):
    """Quantize rows [N, PAIRS], the first and the second column of each pair, in tiles of pairs.

    Returns codes e4m3 [N, PAIRS / TILE_PAIRS, TILE_PAIRS], twice, and scales [N, PAIRS / TILE_PAIRS].
    """
    x = tl.reshape(x.to(tl.float32), [x.shape[0], x.shape[1] // TILE_PAIRS, TILE_PAIRS])
    y = tl.reshape(y.to(tl.float32), [x.shape[0], x.shape[1], TILE_PAIRS])
    scales = power_of_two_scale(tl.max(tl.maximum(tl.abs(x), tl.abs(y)), 2), SMALLEST)
    return to_fp8(x, scales[:, :, None]), to_fp8(y, scales[:, :, None]), scales


@triton.jit
def quantize(x, scale_ptr):
    """Convert x to e4m3 where there is a scale; else return it unchanged."""
    if scale_ptr is not None:
        x = to_fp8(x, tl.load(scale_ptr))
    return x


@triton.jit
def store_kv_c(row_ptr, kv_c, scale_ptr, RANK: tl.constexpr, COLUMNS: tl.constexpr):
    """Store a latent, RANK of COLUMNS elements, at the start of its cache row, in the format of the pointer's type."""
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


@triton.jit
def store_shared(cache_ptr, stride, slot, x, y, WIDTH: tl.constexpr):
    """Store rows of shared keys, given as pairs [N, PAIRS], at slots [N, 1] int64; skip rows with slot -1.

    Returns the pairs as `cache.shared_rows.read_rows` would read them, in their own type.
    """
    column, mask = tl.arange(0, 2 * x.shape[1])[None, :], slot >= 0
    if cache_ptr.dtype.element_ty == tl.uint8:
        NOPE: tl.constexpr = WIDTH - PAGE_ROPE
        NUM_TILES: tl.constexpr = x.shape[1] // (PAGE_TILE // 2)
        page_ptr = cache_ptr + slot // PAGE_ROWS * stride
        data_ptr = page_ptr + slot % PAGE_ROWS * (NOPE + 2 * PAGE_ROPE)
        scale_ptr = page_ptr + PAGE_ROWS * (NOPE + 2 * PAGE_ROPE) + slot % PAGE_ROWS * PAGE_SCALE_BYTES
        rope_x, rope_y = x.to(tl.bfloat16), y.to(tl.bfloat16)
        code_x, code_y, scales = quantize_pairs(rope_x, rope_y, _SMALLEST_AMAX, PAGE_TILE // 2)
        byte_x = tl.reshape(code_x.to(tl.uint8, bitcast=True), x.shape)
        byte_y = tl.reshape(code_y.to(tl.uint8, bitcast=True), x.shape)
        tl.store(data_ptr + column, tl.interleave(byte_x, byte_y), mask=mask & (column < NOPE))
        rope_ptr = (data_ptr + NOPE).to(tl.pointer_type(tl.bfloat16)) + (column - NOPE)
        tl.store(rope_ptr, tl.interleave(rope_x, rope_y), mask=mask & (column >= NOPE) & (column < WIDTH))
        tile = tl.arange(0, NUM_TILES)[None, :]
        exponents = (scales.to(tl.int32, bitcast=True) >> 23).to(tl.uint8)
        tl.store(scale_ptr + tile, exponents, mask=mask & (tile < NOPE // PAGE_TILE))
        byte = tl.arange(0, PAGE_SCALE_BYTES)[None, :] + tl.zeros_like(slot)
        tl.store(scale_ptr + byte, tl.zeros_like(byte).to(tl.uint8), mask=mask & (byte >= NOPE // PAGE_TILE))
        is_rope = tl.arange(0, x.shape[1])[None, :] >= NOPE // 2
        nope_x = tl.reshape(code_x.to(tl.float32) * scales[:, :, None], x.shape)
        nope_y = tl.reshape(code_y.to(tl.float32) * scales[:, :, None], y.shape)
        x = tl.where(is_rope, rope_x.to(x.dtype), nope_x.to(x.dtype))
        y = tl.where(is_rope, rope_y.to(y.dtype), nope_y.to(y.dtype))
    else:
        rows = tl.interleave(x, y).to(cache_ptr.dtype.element_ty)
        tl.store(cache_ptr + slot * stride + column, rows, mask=mask & (column < WIDTH))
    return x, y


@triton.jit
def quantize_kernel(
    latents_ptr,
    rows_ptr,
    scale_ptr,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    RANK_COLUMNS: tl.constexpr,
    ROPE_COLUMNS: tl.constexpr,
):
    """Quantize one latent per program."""
    row = tl.program_id(0).to(tl.int64)
    latents_ptr += row * (RANK + ROPE)
    rows_ptr += row * WIDTH
    column, rope_column = tl.arange(0, RANK_COLUMNS), tl.arange(0, ROPE_COLUMNS)
    kv_c = tl.load(latents_ptr + column, mask=column < RANK, other=0.0)
    store_kv_c(rows_ptr, kv_c, scale_ptr, RANK, RANK_COLUMNS)
    k_pe = tl.load(latents_ptr + RANK + rope_column, mask=rope_column < ROPE, other=0.0)
    tl.store(k_pe_of(rows_ptr, RANK) + rope_column, quantize(k_pe, scale_ptr), mask=rope_column < ROPE)


def round_latents(latents: Tensor, kv_lora_rank: int, storage: torch.dtype, kv_scale: Tensor | None) -> Tensor:
    """Compute `round_latents` in two kernels, whose arithmetic is the cache's."""
    formats.check_kv_scale(storage, kv_scale)
    rope = latents.shape[1] - kv_lora_rank
    width = formats.row_width(storage, kv_lora_rank, rope)
    rows = latents.new_empty(len(latents), width, dtype=storage)
    quantize_kernel[(len(latents),)](
        latents.contiguous(),
        rows,
        kv_scale,
        WIDTH=width,
        RANK=kv_lora_rank,
        ROPE=rope,
        RANK_COLUMNS=triton.next_power_of_2(kv_lora_rank),
        ROPE_COLUMNS=triton.next_power_of_2(rope),
    )
    return dequantize_rows(rows, kv_lora_rank, kv_scale, latents.dtype)


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


def read_cache_rows(kv_cache: Tensor, slots: Tensor) -> Tensor:
    """Compute `read_cache_rows` in one kernel."""
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
    """Compute `dequantize_rows` in one kernel."""
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
