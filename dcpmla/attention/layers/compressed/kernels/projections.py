"""Triton kernels between projections, cache and attention with launchers; `attention/layers/compressed/projections.py`
specifies them.

A row is held as two tensors, the first and the second column of each pair, so that RoPE needs no exchange between
threads; norms and scales do not depend on the order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dcpmla.attention.layers.compressed.calls import WindowWrite
from dcpmla.attention.triton.rope import load_pairs, norm_factor, rotate_range, store_pairs
from dcpmla.cache import index_keys
from dcpmla.cache.formats import FP8
from dcpmla.cache.kernels import quantize_pairs, store_shared
from dcpmla.parallel.formats import BLOCK
from dcpmla.parallel.kernels.quantize import store_codes

_GROUP_PAIRS = tl.constexpr(BLOCK // 2)
_SMALLEST_AMAX = tl.constexpr(index_keys.SMALLEST_AMAX)
_MANY_ROWS = 4096  # rows from which a warp processes more than one


@triton.jit(do_not_specialize=["scales_stride"])
def rows_kernel(
    down_ptr,
    cache_ptr,
    q_weight_ptr,
    kv_weight_ptr,
    cos_sin_ptr,
    positions_ptr,
    request_ptr,
    seq_lens_ptr,
    states_ptr,
    q_c_ptr,
    rows_ptr,
    codes_ptr,
    scales_ptr,
    down_stride,
    cache_stride,
    scales_stride,
    eps,
    ring_rows,
    Q_RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    Q_RANK_P: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Finish a token's row, write it into its window, and normalize the query latent; two programs per token."""
    token = tl.program_id(0).to(tl.int64)
    down_ptr += token * down_stride
    if tl.program_id(1) == 0:
        one = tl.zeros([1, 1], tl.int64)
        is_row = one == 0
        x, y = load_pairs(down_ptr + Q_RANK + one, is_row, WIDTH, PAIRS, True)
        weight_x, weight_y = load_pairs(kv_weight_ptr + one, is_row, WIDTH, PAIRS, True)
        factor = norm_factor(x, y, WIDTH, eps)
        x = (weight_x * (x.to(tl.float32) * factor)).to(x.dtype)
        y = (weight_y * (y.to(tl.float32) * factor)).to(y.dtype)
        x, y = rotate_range(x, y, cos_sin_ptr + token * ROPE + one, is_row, 1.0, (WIDTH - ROPE) // 2, ROPE)
        request = tl.load(request_ptr + token)
        position = tl.load(positions_ptr + token)
        state = tl.load(states_ptr + request).to(tl.int64)
        is_kept = (state >= 0) & (tl.load(seq_lens_ptr + request) - position <= ring_rows)
        slot = tl.where(is_kept, state * ring_rows + position % ring_rows, -1) + one
        x, y = store_shared(cache_ptr, cache_stride, slot, x, y, WIDTH)
        store_pairs(rows_ptr + token * WIDTH + one, x, y, is_row, WIDTH, PAIRS, True)
    else:
        column = tl.arange(0, Q_RANK_P)
        latent = tl.load(down_ptr + column, mask=column < Q_RANK, other=0.0)
        q_weight = tl.load(q_weight_ptr + column, mask=column < Q_RANK, other=0.0)
        wide = latent.to(tl.float32)
        q_c = (q_weight * (wide * tl.rsqrt(tl.sum(wide * wide) / Q_RANK + eps))).to(latent.dtype)
        tl.store(q_c_ptr + token * Q_RANK + column, q_c, mask=column < Q_RANK)
        if codes_ptr is not None:
            store_codes(q_c, token, 0, codes_ptr, scales_ptr, scales_stride, Q_RANK)


def norm_rope_window(call: WindowWrite) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `projections.norm_rope_window` in one kernel."""
    down, cache, q_weight, kv_weight, eps, cos_sin, positions, request, seq_lens, states, ring_rows, quantizes = call
    q_c, rows, codes, scales = call.new_results()
    (num_tokens, q_rank), width = q_c.shape, len(kv_weight)
    if num_tokens:
        rows_kernel[(num_tokens, 2)](
            down,
            cache,
            q_weight,
            kv_weight,
            cos_sin.contiguous(),
            positions,
            request,
            seq_lens,
            states,
            q_c,
            rows,
            *((codes, scales) if quantizes else (None, None)),
            down.stride(0),
            cache.stride(0),
            scales.stride(1),
            eps,
            ring_rows,
            Q_RANK=q_rank,
            WIDTH=width,
            ROPE=cos_sin.shape[1],
            Q_RANK_P=triton.next_power_of_2(q_rank),
            PAIRS=_num_pairs(width),
        )
    return q_c, rows, codes, scales


@triton.jit(do_not_specialize=["num_rows"])
def query_kernel(
    q_ptr,
    cos_sin_ptr,
    num_rows,
    stride_token,
    stride_head,
    eps,
    NUM_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Normalize and rotate a tile of (token, head) rows in place; one program per tile."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    token, is_row = row // NUM_HEADS, row < num_rows
    q_ptr += token * stride_token + row % NUM_HEADS * stride_head
    x, y = load_pairs(q_ptr, is_row, WIDTH, PAIRS, True)
    if eps is not None:
        factor = norm_factor(x, y, WIDTH, eps).to(x.dtype).to(tl.float32)
        x, y = (x.to(tl.float32) * factor).to(x.dtype), (y.to(tl.float32) * factor).to(y.dtype)
    x, y = rotate_range(x, y, cos_sin_ptr + token * ROPE, is_row, 1.0, (WIDTH - ROPE) // 2, ROPE)
    store_pairs(q_ptr, x, y, is_row, WIDTH, PAIRS, True)


def norm_rope_query_(q: Tensor, eps: float | None, cos_sin: Tensor) -> None:
    """Compute `projections.norm_rope_query_` in one kernel."""
    if len(q):
        # One warp works in place: a row must be loaded whole before it is stored.
        grid, num_rows, sizes = _tiles(q, cos_sin)
        query_kernel[grid](q, cos_sin.contiguous(), num_rows, *q.stride()[:2], eps, **sizes)


@triton.jit(do_not_specialize=["num_rows"])
def heads_kernel(
    attended_ptr,
    lse_ptr,
    sinks_ptr,
    cos_sin_ptr,
    out_ptr,
    scales_ptr,
    num_rows,
    stride_token,
    stride_head,
    lse_stride_token,
    lse_stride_head,
    NUM_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Weigh with the sink, rotate back and, if scales are given, quantize a tile of (token, head) rows."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    token, head, is_row = row // NUM_HEADS, row % NUM_HEADS, row < num_rows
    x, y = load_pairs(attended_ptr + token * stride_token + head * stride_head, is_row, WIDTH, PAIRS, True)
    lse = tl.load(lse_ptr + token * lse_stride_token + head * lse_stride_head, mask=is_row, other=0.0)
    share = 1 / (1 + tl.exp(tl.load(sinks_ptr + head, mask=is_row, other=0.0) - lse))
    is_there = share > 0  # a share of NaN also means no keys
    wide_x = tl.where(is_there, x.to(tl.float32) * share, 0.0)
    wide_y = tl.where(is_there, y.to(tl.float32) * share, 0.0)
    cos_sin_ptr += token * ROPE
    wide_x, wide_y = rotate_range(wide_x, wide_y, cos_sin_ptr, is_row, -1.0, (WIDTH - ROPE) // 2, ROPE)
    x, y = wide_x.to(x.dtype), wide_y.to(y.dtype)
    if scales_ptr is not None:
        NUM_GROUPS: tl.constexpr = PAIRS // _GROUP_PAIRS
        group = tl.arange(0, NUM_GROUPS)[None, :]
        code_x, code_y, scales = quantize_pairs(x, y, _SMALLEST_AMAX, _GROUP_PAIRS)
        is_group = is_row & (group < WIDTH // (2 * _GROUP_PAIRS))
        tl.store(scales_ptr + row * (WIDTH // (2 * _GROUP_PAIRS)) + group, scales, mask=is_group)
        x, y = tl.reshape(code_x, [ROWS, PAIRS]), tl.reshape(code_y, [ROWS, PAIRS])
    store_pairs(out_ptr + row * WIDTH, x, y, is_row, WIDTH, PAIRS, True)


def unrope_heads(out: Tensor, lse: Tensor, sinks: Tensor, cos_sin: Tensor, quantizes: bool) -> tuple[Tensor, Tensor]:
    """Compute `projections.unrope_heads` in one kernel."""
    if quantizes and out.shape[2] % BLOCK:
        raise ValueError(f"out has rows of {out.shape[2]} columns; expected a multiple of {BLOCK}")
    heads = out.new_empty(out.shape, dtype=FP8 if quantizes else out.dtype)
    scales = out.new_empty(*out.shape[:2], out.shape[2] // BLOCK if quantizes else 0, dtype=torch.float32)
    if len(out):
        grid, num_rows, sizes = _tiles(out, cos_sin)
        written = heads, scales if quantizes else None
        strides = *out.stride()[:2], *lse.stride()
        heads_kernel[grid](out, lse, sinks, cos_sin.contiguous(), *written, num_rows, *strides, **sizes)
    return heads, scales


def _tiles(x: Tensor, cos_sin: Tensor) -> tuple[tuple[int], int, dict[str, int]]:
    """Return the grid, the number of rows and the sizes for a kernel over the (token, head) rows of x [T, h, D]."""
    num_rows, width = x.shape[0] * x.shape[1], x.shape[2]
    rows = 1 if num_rows < _MANY_ROWS else 4
    sizes = {"NUM_HEADS": x.shape[1], "WIDTH": width, "ROPE": cos_sin.shape[1], "PAIRS": _num_pairs(width)}
    return (triton.cdiv(num_rows, rows),), num_rows, {**sizes, "ROWS": rows, "num_warps": 1}


def _num_pairs(width: int) -> int:
    return triton.next_power_of_2(width) // 2
