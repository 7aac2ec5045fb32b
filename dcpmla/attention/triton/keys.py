"""Loads of cached keys of any format as tiles in the queries' dtype, for the portable decode kernel."""

import triton
import triton.language as tl

from dcpmla.cache import formats, shared_format

TILE = tl.constexpr(formats.TILE)
SHARED_TILE = tl.constexpr(shared_format.TILE)  # also the width of a shared key's part that is not quantized
PAGE_ROWS = tl.constexpr(shared_format.PAGE_ROWS)
SCALE_BYTES = tl.constexpr(shared_format.SCALE_BYTES)


@triton.jit
def load_keys(row_ptr, is_key, dtype: tl.constexpr, KEYS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr):
    """Load cache rows of any of `cache.formats` as kv_c [KEYS, LATENT], k_pe [KEYS, ROPE]; kv_scale is not applied.

    Shared keys (ROPE is 0) have no k_pe; kv_c is returned for it.
    """
    mask = is_key[:, None]  # rows past the last key may hold NaN, and 0 x NaN is NaN
    k_pe_ptr = row_ptr + LATENT
    if row_ptr.dtype.element_ty == tl.uint8:
        tile, column = tl.arange(0, LATENT // TILE), tl.arange(0, TILE)
        values = tl.load(
            row_ptr[:, None, None] + (tile * TILE)[None, :, None] + column[None, None, :],
            mask=mask[:, :, None],
            other=0.0,
        )
        scale_ptr = k_pe_ptr.to(tl.pointer_type(tl.float32), bitcast=True)
        scales = tl.load(scale_ptr[:, None] + tile[None, :], mask=mask, other=0.0)
        products = values.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scales[:, :, None]
        kv_c = tl.reshape(products.to(dtype), [KEYS, LATENT])
        k_pe_ptr = (k_pe_ptr + LATENT // TILE * 4).to(tl.pointer_type(tl.bfloat16), bitcast=True)
    else:
        kv_c = _upcast(tl.load(row_ptr[:, None] + tl.arange(0, LATENT)[None, :], mask=mask, other=0.0), dtype)
    k_pe = kv_c
    if ROPE:
        k_pe = _upcast(tl.load(k_pe_ptr[:, None] + tl.arange(0, ROPE)[None, :], mask=mask, other=0.0), dtype)
    return kv_c, k_pe


@triton.jit
def load_planar(cache_ptr, page_stride, row, is_key, dtype: tl.constexpr, LATENT: tl.constexpr):
    """Load rows of `cache.shared_format`' fp8_ds_mla, given their numbers [KEYS] int64, as [KEYS, LATENT]."""
    page_ptr = cache_ptr + row // PAGE_ROWS * page_stride
    row = row % PAGE_ROWS
    row_ptr = page_ptr + row * (LATENT + SHARED_TILE)
    scale_ptr = page_ptr + PAGE_ROWS * (LATENT + SHARED_TILE) + row * SCALE_BYTES
    tile, column = tl.arange(0, LATENT // SHARED_TILE), tl.arange(0, SHARED_TILE)
    is_coded = (tile < LATENT // SHARED_TILE - 1)[None, :]
    mask = is_key[:, None]
    codes = tl.load(
        row_ptr[:, None, None] + (tile * SHARED_TILE)[None, :, None] + column[None, None, :],
        mask=(mask & is_coded)[:, :, None],
        other=0.0,
    )
    exponents = tl.load(scale_ptr[:, None] + tile[None, :], mask=mask & is_coded, other=0.0)
    scales = (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    values = (codes.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scales[:, :, None]).to(dtype)
    rope_ptr = (row_ptr + LATENT - SHARED_TILE).to(tl.pointer_type(tl.bfloat16), bitcast=True)
    rope = _upcast(tl.load(rope_ptr[:, None] + column[None, :], mask=mask, other=0.0), dtype)
    return tl.reshape(tl.where(is_coded[:, :, None], values, rope[:, None, :]), [row.shape[0], LATENT])


@triton.jit
def _upcast(values, dtype: tl.constexpr):
    if values.dtype == dtype:
        return values
    return values.to(tl.float32).to(dtype)  # e4m3 -> bfloat16 alone does not compile for sm_89
