"""Triton kernels around the projections, each with its launcher; the torch code of `attention/projections.py` specifies them."""

import triton
import triton.language as tl
from torch import Tensor

_LATENT_COLUMNS = 64  # of W_UK in one program
_NOPE_ROWS = 64  # of W_UK at a time: all at once, a product of float32 would be unrolled into more values than there are registers
_MAX_TOKENS = 64  # in one program


@triton.jit
def _norm(x_ptr, weight_ptr, column, width, eps):
    """RMS norm of a row in float32, rounded where transformers rounds: behind the norm, and again behind its weight."""
    x = tl.load(x_ptr + column, mask=column < width, other=0.0)
    wide = x.to(tl.float32)
    x = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)).to(x.dtype)
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0)
    return (x.to(tl.float32) * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def _rotate(x_ptr, out_ptr, cos_sin_ptr, token, mask, ROPE: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Rotate rows of ROPE columns by their tokens' angles, in float32; without angles, copy them. Pointers, token and mask are [N, 1]."""
    pair = tl.arange(0, PAIRS)[None, :]
    mask = mask & (pair < ROPE // 2)
    first = 2 * pair if INTERLEAVED else pair
    second = first + (1 if INTERLEAVED else ROPE // 2)
    x = tl.load(x_ptr + first, mask=mask, other=0.0)
    y = tl.load(x_ptr + second, mask=mask, other=0.0)
    if cos_sin_ptr is not None:
        cos = tl.load(cos_sin_ptr + token * ROPE + pair, mask=mask, other=0.0)
        sin = tl.load(cos_sin_ptr + token * ROPE + ROPE // 2 + pair, mask=mask, other=0.0)
        wide_x, wide_y = x.to(tl.float32), y.to(tl.float32)
        x = (wide_x * cos - wide_y * sin).to(x.dtype)
        y = (wide_y * cos + wide_x * sin).to(y.dtype)
    tl.store(out_ptr + first, x, mask=mask)
    tl.store(out_ptr + second, y, mask=mask)


@triton.jit
def latents_kernel(
    down_ptr,
    q_weight_ptr,
    kv_weight_ptr,
    cos_sin_ptr,
    slots_ptr,
    q_c_ptr,
    latents_ptr,
    cache_ptr,
    down_stride,
    block_size,
    cache_stride_block,
    cache_stride_row,
    eps,
    kv_scale,
    Q_RANK: tl.constexpr,
    KV_RANK: tl.constexpr,
    ROPE: tl.constexpr,
    Q_COLUMNS: tl.constexpr,
    KV_COLUMNS: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Two programs a token: its cache row, into the latents and to its slot; and the norm of its query latent, if it has one."""
    token = tl.program_id(0).to(tl.int64)
    down_ptr += token * down_stride
    if tl.program_id(1) == 0:
        down_ptr += Q_RANK
        latents_ptr += token * (KV_RANK + ROPE)
        column = tl.arange(0, KV_COLUMNS)
        kv_c = _norm(down_ptr, kv_weight_ptr, column, KV_RANK, eps)
        kv_c = (kv_c.to(tl.float32) * kv_scale).to(kv_c.dtype)
        row = tl.zeros([1, 1], tl.int64)  # k_pe is a tile of one row
        k_pe_ptr = down_ptr + KV_RANK + row
        tl.store(latents_ptr + column, kv_c, mask=column < KV_RANK)
        _rotate(k_pe_ptr, latents_ptr + KV_RANK + row, cos_sin_ptr, token + row, row == 0, ROPE, PAIRS, INTERLEAVED)
        slot = tl.load(slots_ptr + token)
        if slot >= 0:
            cache_ptr += slot // block_size * cache_stride_block + slot % block_size * cache_stride_row
            tl.store(cache_ptr + column, kv_c, mask=column < KV_RANK)
            _rotate(k_pe_ptr, cache_ptr + KV_RANK + row, cos_sin_ptr, token + row, row == 0, ROPE, PAIRS, INTERLEAVED)
    elif q_weight_ptr is not None:
        q_column = tl.arange(0, Q_COLUMNS)
        q_c = _norm(down_ptr, q_weight_ptr, q_column, Q_RANK, eps)
        tl.store(q_c_ptr + token * Q_RANK + q_column, q_c, mask=q_column < Q_RANK)


def finish_latents(
    down: Tensor,
    kv_cache: Tensor,
    slots: Tensor,
    q_weight: Tensor | None,
    kv_weight: Tensor,
    eps: float,
    kv_scale: float,
    cos_sin: Tensor | None,
    rope_interleaved: bool,
    cache_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`projections.finish_latents` in one kernel."""
    num_tokens, kv_rank = len(down), len(kv_weight)
    q_rank = 0 if q_weight is None else len(q_weight)
    rope = down.shape[1] - kv_rank - q_rank
    q_c, latents = down.new_empty(num_tokens, q_rank), down.new_empty(num_tokens, kv_rank + rope)
    latents_kernel[(num_tokens, 1 if q_weight is None else 2)](
        down,
        q_weight,
        kv_weight,
        None if cos_sin is None else cos_sin.contiguous(),
        slots.contiguous(),
        q_c,
        latents,
        kv_cache,
        down.stride(0),
        kv_cache.shape[1],
        *kv_cache.stride()[:2],
        eps,
        kv_scale,
        Q_RANK=q_rank,
        KV_RANK=kv_rank,
        ROPE=rope,
        Q_COLUMNS=triton.next_power_of_2(max(1, q_rank)),
        KV_COLUMNS=triton.next_power_of_2(kv_rank),
        PAIRS=triton.next_power_of_2(rope // 2),
        INTERLEAVED=rope_interleaved,
    )
    return q_c, latents


@triton.jit(do_not_specialize=["num_tokens"])
def absorb_kernel(
    q_ptr,
    w_uk_ptr,
    cos_sin_ptr,
    out_ptr,
    num_tokens,
    num_heads,
    q_stride_token,
    q_stride_head,
    w_stride_head,
    w_stride_row,
    NOPE: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    PAIRS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """A program a (tile of tokens, head, tile of the latent's columns): its part of q_nope W_UK; the last one rotates q_pe instead."""
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    head, tile = tl.program_id(1).to(tl.int64), tl.program_id(2)
    q_ptr += token * q_stride_token + head * q_stride_head
    w_uk_ptr += head * w_stride_head
    out_ptr += (token * num_heads + head) * (RANK + ROPE)
    is_token = token < num_tokens
    if tile * COLUMNS < RANK:
        column = tile * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        ql_nope = tl.zeros([TOKENS, COLUMNS], tl.float32)
        for first in range(0, NOPE, ROWS):
            row = first + tl.arange(0, ROWS)
            q_nope = tl.load(q_ptr + row[None, :], mask=is_token & (row[None, :] < NOPE), other=0.0)
            w_uk_mask = (row[:, None] < NOPE) & (column < RANK)
            w_uk = tl.load(w_uk_ptr + row[:, None] * w_stride_row + column, mask=w_uk_mask, other=0.0)
            ql_nope = tl.dot(q_nope, w_uk, ql_nope, input_precision="ieee")
        tl.store(out_ptr + column, ql_nope.to(out_ptr.dtype.element_ty), mask=is_token & (column < RANK))
    else:
        _rotate(q_ptr + NOPE, out_ptr + RANK, cos_sin_ptr, token, is_token, ROPE, PAIRS, INTERLEAVED)


def absorb_query(q: Tensor, w_uk: Tensor, cos_sin: Tensor | None, rope_interleaved: bool, q_scale: Tensor | None) -> Tensor:
    """`projections.absorb_query` in one kernel."""
    num_tokens, num_heads, head_dim = q.shape
    nope, rank = w_uk.shape[1:]
    rope = head_dim - nope
    out = q.new_empty(num_tokens, num_heads, rank + rope)
    tokens = min(_MAX_TOKENS, max(16, triton.next_power_of_2(num_tokens)))  # 16: the least that tl.dot takes
    absorb_kernel[(triton.cdiv(num_tokens, tokens), num_heads, triton.cdiv(rank, _LATENT_COLUMNS) + 1)](
        q,
        w_uk,
        None if cos_sin is None else cos_sin.contiguous(),
        out,
        num_tokens,
        num_heads,
        *q.stride()[:2],
        *w_uk.stride()[:2],
        NOPE=nope,
        RANK=rank,
        ROPE=rope,
        PAIRS=triton.next_power_of_2(rope // 2),
        TOKENS=tokens,
        ROWS=_NOPE_ROWS,
        COLUMNS=_LATENT_COLUMNS,
        INTERLEAVED=rope_interleaved,
    )
    return out


@triton.jit(do_not_specialize=["num_tokens"])
def rotate_kernel(
    x_ptr,
    cos_sin_ptr,
    num_tokens,
    stride_token,
    stride_head,
    ROPE: tl.constexpr,
    PAIRS: tl.constexpr,
    TOKENS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """A program a (tile of tokens, head), in place."""
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    x_ptr += token * stride_token + tl.program_id(1).to(tl.int64) * stride_head
    _rotate(x_ptr, x_ptr, cos_sin_ptr, token, token < num_tokens, ROPE, PAIRS, INTERLEAVED)


def rotate_(x: Tensor, cos_sin: Tensor, rope_interleaved: bool) -> None:
    """`projections.rotate_query_` of the rope part [T, h, R], in one kernel."""
    num_tokens, num_heads, rope = x.shape
    rotate_kernel[(triton.cdiv(num_tokens, 16), num_heads)](
        x,
        cos_sin.contiguous(),
        num_tokens,
        *x.stride()[:2],
        ROPE=rope,
        PAIRS=triton.next_power_of_2(rope // 2),
        TOKENS=16,
        INTERLEAVED=rope_interleaved,
        num_warps=1,  # in place: all loads of a row come before its stores
    )
