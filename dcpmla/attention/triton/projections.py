"""Triton kernels around the projections with their launchers; `attention/projections.py` specifies them."""

import triton
import triton.language as tl
from torch import Tensor

from dcpmla.attention.projection_calls import LatentWrite, QueryAbsorption
from dcpmla.attention.triton.rope import load_pairs, rotate, rotate_pairs, store_pairs
from dcpmla.cache.formats import check_kv_scale, row_width
from dcpmla.cache.kernels import k_pe_of, quantize, store_kv_c
from dcpmla.parallel.formats import BLOCK
from dcpmla.parallel.kernels.quantize import store_codes

_COLUMNS = tl.constexpr(64)  # columns of W_UK per program
# Rows of W_UK at a time: an unrolled float32 product over all rows would need too many registers.
_ROWS = tl.constexpr(64)
_BLOCK = tl.constexpr(BLOCK)
_MAX_TOKENS = 64  # maximum tokens per program


@triton.jit
def _norm(x_ptr, weight_ptr, column, width, eps):
    """Apply RMS norm to a row in float32, rounded where transformers rounds: after the norm and after its weight."""
    x = tl.load(x_ptr + column, mask=column < width, other=0.0)
    wide = x.to(tl.float32)
    x = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)).to(x.dtype)
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0)
    return (x.to(tl.float32) * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def _norm_pairs(x, y, weight_ptr, mask, eps, ROPE: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Apply RMS norm to a row in pairs, [1, PAIRS] each, rounded as `_norm` rounds; weight_ptr and mask are [1, 1]."""
    wide_x, wide_y = x.to(tl.float32), y.to(tl.float32)
    total = tl.sum(wide_x * wide_x + wide_y * wide_y, 1)
    factor = tl.rsqrt(total / ROPE + eps)[:, None]
    weight_x, weight_y = load_pairs(weight_ptr, mask, ROPE, PAIRS, INTERLEAVED)
    x = ((wide_x * factor).to(x.dtype).to(tl.float32) * weight_x.to(tl.float32)).to(x.dtype)
    y = ((wide_y * factor).to(y.dtype).to(tl.float32) * weight_y.to(tl.float32)).to(y.dtype)
    return x, y


@triton.jit(do_not_specialize=["scales_stride"])
def latents_kernel(
    down_ptr,
    q_weight_ptr,
    kv_weight_ptr,
    cos_sin_ptr,
    slots_ptr,
    q_c_ptr,
    codes_ptr,
    scales_ptr,
    scales_stride,
    latents_ptr,
    cache_ptr,
    down_stride,
    block_size,
    cache_stride_block,
    cache_stride_row,
    eps,
    kv_lora_scale,
    kv_scale_ptr,
    k_pe_weight_ptr,
    Q_RANK: tl.constexpr,
    KV_RANK: tl.constexpr,
    ROPE: tl.constexpr,
    Q_COLUMNS: tl.constexpr,
    KV_COLUMNS: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Finish a token's latent, write it to its cache slot, and normalize the query latent; two programs per token."""
    token = tl.program_id(0).to(tl.int64)
    down_ptr += token * down_stride
    if tl.program_id(1) == 0:
        down_ptr += Q_RANK
        latents_ptr += token * (KV_RANK + ROPE)
        column = tl.arange(0, KV_COLUMNS)
        kv_c = _norm(down_ptr, kv_weight_ptr, column, KV_RANK, eps)
        kv_c = (kv_c.to(tl.float32) * kv_lora_scale).to(kv_c.dtype)
        tl.store(latents_ptr + column, kv_c, mask=column < KV_RANK)
        row = tl.zeros([1, 1], tl.int64)  # k_pe is a tile of one row
        x, y = load_pairs(down_ptr + KV_RANK + row, row == 0, ROPE, PAIRS, INTERLEAVED)
        if k_pe_weight_ptr is not None:
            x, y = _norm_pairs(x, y, k_pe_weight_ptr + row, row == 0, eps, ROPE, PAIRS, INTERLEAVED)
        x, y = rotate_pairs(x, y, cos_sin_ptr, token + row, row == 0, ROPE, PAIRS)
        store_pairs(latents_ptr + KV_RANK + row, x, y, row == 0, ROPE, PAIRS, INTERLEAVED)
        slot = tl.load(slots_ptr + token)
        if slot >= 0:
            cache_ptr += slot // block_size * cache_stride_block + slot % block_size * cache_stride_row
            store_kv_c(cache_ptr, kv_c, kv_scale_ptr, KV_RANK, KV_COLUMNS)
            k_pe_ptr = k_pe_of(cache_ptr, KV_RANK) + row
            store_pairs(
                k_pe_ptr, quantize(x, kv_scale_ptr), quantize(y, kv_scale_ptr), row == 0, ROPE, PAIRS, INTERLEAVED
            )
    elif q_weight_ptr is not None:
        q_column = tl.arange(0, Q_COLUMNS)
        q_c = _norm(down_ptr, q_weight_ptr, q_column, Q_RANK, eps)
        tl.store(q_c_ptr + token * Q_RANK + q_column, q_c, mask=q_column < Q_RANK)
        if codes_ptr is not None:
            store_codes(q_c, token, 0, codes_ptr, scales_ptr, scales_stride, Q_RANK)


def norm_rope_cache(call: LatentWrite) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `projections.norm_rope_cache` in one kernel."""
    down, kv_cache, slots, q_weight, kv_weight, eps, kv_lora_scale, cos_sin, rope_interleaved, kv_scale, *_ = call
    num_tokens, kv_rank = len(down), len(kv_weight)
    q_rank = 0 if q_weight is None else len(q_weight)
    rope = down.shape[1] - kv_rank - q_rank
    check_kv_scale(kv_cache.dtype, kv_scale)
    width = row_width(kv_cache.dtype, kv_rank, rope)
    if kv_cache.shape[-1] != width:
        raise ValueError(
            f"kv_cache has rows of {kv_cache.shape[-1]} {kv_cache.dtype}; latents of {kv_rank} + {rope} take {width}"
        )
    q_c, latents, codes, scales = call.new_results()
    latents_kernel[(num_tokens, 1 if q_weight is None else 2)](
        down,
        q_weight,
        kv_weight,
        None if cos_sin is None else cos_sin.contiguous(),
        slots.contiguous(),
        q_c,
        *((codes, scales) if call.quantizes else (None, None)),
        scales.stride(1),
        latents,
        kv_cache,
        down.stride(0),
        kv_cache.shape[1],
        *kv_cache.stride()[:2],
        eps,
        kv_lora_scale,
        kv_scale,
        call.k_pe_weight,
        Q_RANK=q_rank,
        KV_RANK=kv_rank,
        ROPE=rope,
        Q_COLUMNS=triton.next_power_of_2(max(1, q_rank)),
        KV_COLUMNS=triton.next_power_of_2(kv_rank),
        PAIRS=triton.next_power_of_2(rope // 2),
        INTERLEAVED=rope_interleaved,
    )
    return q_c, latents, codes, scales


@triton.jit(do_not_specialize=["num_tokens"])
def absorb_kernel(
    q_ptr,
    w_uk_ptr,
    w_scales_ptr,
    cos_sin_ptr,
    q_scale_ptr,
    out_ptr,
    num_tokens,
    num_heads,
    q_stride_token,
    q_stride_head,
    w_stride_head,
    w_stride_row,
    w_scales_stride_head,
    w_scales_stride_block,
    NOPE: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    PAIRS: tl.constexpr,
    TOKENS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Multiply q_nope by W_UK and rotate q_pe.

    One program per (tile of tokens, head, tile of the latent's columns); the last tile is q_pe.
    """
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    head, tile = tl.program_id(1).to(tl.int64), tl.program_id(2)
    q_ptr += token * q_stride_token + head * q_stride_head
    w_uk_ptr += head * w_stride_head
    if w_scales_ptr is not None:
        w_scales_ptr += head * w_scales_stride_head
    out_ptr += (token * num_heads + head) * (RANK + ROPE)
    is_token = token < num_tokens
    if tile * _COLUMNS < RANK:
        column = tile * _COLUMNS + tl.arange(0, _COLUMNS)[None, :]
        ql_nope = tl.zeros([TOKENS, _COLUMNS], tl.float32)
        for first in range(0, NOPE, _ROWS):
            row = first + tl.arange(0, _ROWS)
            q_nope = tl.load(q_ptr + row[None, :], mask=is_token & (row[None, :] < NOPE), other=0.0)
            w_uk_mask = (row[:, None] < NOPE) & (column < RANK)
            w_uk = tl.load(w_uk_ptr + row[:, None] * w_stride_row + column, mask=w_uk_mask, other=0.0)
            if w_scales_ptr is not None:  # rows and columns of a tile share a scale
                block = first // _BLOCK * w_scales_stride_block + tile * _COLUMNS // _BLOCK
                w_uk = (w_uk.to(tl.float32) * tl.load(w_scales_ptr + block)).to(q_ptr.dtype.element_ty)
            ql_nope = tl.dot(q_nope, w_uk, ql_nope, input_precision="ieee")
        ql_nope = quantize(ql_nope.to(q_ptr.dtype.element_ty), q_scale_ptr)
        tl.store(out_ptr + column, ql_nope, mask=is_token & (column < RANK))
    else:
        x, y = rotate(q_ptr + NOPE, cos_sin_ptr, token, is_token, ROPE, PAIRS, INTERLEAVED)
        store_pairs(
            out_ptr + RANK, quantize(x, q_scale_ptr), quantize(y, q_scale_ptr), is_token, ROPE, PAIRS, INTERLEAVED
        )


def absorb_query(call: QueryAbsorption) -> Tensor:
    """Compute `projections.absorb_query` in one kernel."""
    q, w_uk, cos_sin, rope_interleaved, q_scale, w_scales, is_deterministic = call
    num_tokens, num_heads, head_dim = q.shape
    nope, rank = w_uk.shape[1:]
    rope = head_dim - nope
    out = call.new_query()
    tokens = min(_MAX_TOKENS, max(16, triton.next_power_of_2(num_tokens)))  # 16: the least that tl.dot takes
    if is_deterministic:
        tokens = _MAX_TOKENS  # Hopper has another instruction for fewer
    absorb_kernel[(triton.cdiv(num_tokens, tokens), num_heads, triton.cdiv(rank, _COLUMNS.value) + 1)](
        q,
        w_uk,
        w_scales,
        None if cos_sin is None else cos_sin.contiguous(),
        q_scale,
        out,
        num_tokens,
        num_heads,
        *q.stride()[:2],
        *w_uk.stride()[:2],
        *((0, 0) if w_scales is None else w_scales.stride()[:2]),
        NOPE=nope,
        RANK=rank,
        ROPE=rope,
        PAIRS=triton.next_power_of_2(rope // 2),
        TOKENS=tokens,
        INTERLEAVED=rope_interleaved,
    )
    return out
