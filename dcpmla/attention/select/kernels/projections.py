"""Triton kernels around the indexer's projections with launchers; `attention/select/projections.py` specifies them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dcpmla.attention.select.calls import IndexNorm, IndexRotation
from dcpmla.cache import index_keys
from dcpmla.cache.formats import FP8
from dcpmla.cache.kernels import power_of_two_scale, to_fp8

_MAX_ROWS = 32  # maximum rows per program
_SMALLEST_AMAX = tl.constexpr(index_keys.SMALLEST_AMAX)


@triton.jit
def _rotate(x, cos_sin_ptr, token, is_row, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Rotate the first ROPE columns of rows [N, COLUMNS] by tokens' angles in float32; token and is_row are [N, 1]."""
    column = tl.arange(0, x.shape[1])[None, :]
    if INTERLEAVED:
        pair, is_first, other = column // 2, column % 2 == 0, column ^ 1
    else:
        pair, is_first = column % (ROPE // 2), column < ROPE // 2
        other = tl.where(is_first, column + ROPE // 2, column - ROPE // 2)
    is_rotated = column < ROPE
    mask = is_row & is_rotated
    cos = tl.load(cos_sin_ptr + token * ROPE + pair, mask=mask, other=0.0)
    sin = tl.load(cos_sin_ptr + token * ROPE + ROPE // 2 + pair, mask=mask, other=0.0)
    wide = x.to(tl.float32)
    others = tl.gather(wide, tl.broadcast_to(tl.where(is_rotated, other, column), x.shape), 1)
    return tl.where(is_rotated, (wide * cos + tl.where(is_first, -others, others) * sin).to(x.dtype), x)


@triton.jit
def _transform(x, WIDTH: tl.constexpr):
    """Multiply rows [N, COLUMNS] by `projections.hadamard_matrix`.

    The sign of an entry is the parity of the bits that its row and column share.
    """
    row, column = tl.arange(0, x.shape[1])[:, None], tl.arange(0, x.shape[1])[None, :]
    bits = row & column
    bits ^= bits >> 8
    bits ^= bits >> 4
    bits ^= bits >> 2
    bits ^= bits >> 1
    signs = (1 - 2 * (bits & 1)).to(x.dtype)  # products with them are exact and accumulate in float32
    return (tl.dot(x, signs, input_precision="ieee") * WIDTH**-0.5).to(x.dtype)


@triton.jit
def _to_index_fp8(x):
    """Quantize rows [N, COLUMNS] as `index_keys.index_to_fp8` does."""
    scales = power_of_two_scale(tl.max(tl.abs(x.to(tl.float32)), 1), _SMALLEST_AMAX)
    return to_fp8(x, scales[:, None]), scales


@triton.jit(do_not_specialize=["num_tokens"])
def keys_kernel(
    keys_ptr,
    cache_ptr,
    slots_ptr,
    weight_ptr,
    bias_ptr,
    cos_sin_ptr,
    num_tokens,
    key_stride,
    cache_stride_block,
    eps,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HADAMARD: tl.constexpr,
):
    """Normalize, rotate and store the keys of a tile of tokens; one program per tile."""
    token = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    is_row, is_column = (token < num_tokens)[:, None], column < WIDTH
    x = tl.load(keys_ptr + token[:, None] * key_stride + column[None, :], mask=is_row & is_column[None, :], other=0.0)
    wide = x.to(tl.float32)
    if bias_ptr is not None:
        wide = tl.where(is_column[None, :], wide - tl.sum(wide, 1)[:, None] / WIDTH, 0.0)
    weight = tl.load(weight_ptr + column, mask=is_column, other=0.0).to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 1) / WIDTH + eps)[:, None] * weight[None, :]
    if bias_ptr is not None:
        normed += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    keys = normed.to(x.dtype)
    if cos_sin_ptr is not None:
        keys = _rotate(keys, cos_sin_ptr, token[:, None], is_row, ROPE, INTERLEAVED)
    if HADAMARD:
        keys = _transform(keys, WIDTH)

    slot = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1)
    is_mine = slot >= 0
    slot = tl.maximum(slot, 0)
    block_ptr = cache_ptr + slot // BLOCK_SIZE * cache_stride_block
    offset = slot % BLOCK_SIZE
    if cache_ptr.dtype.element_ty == tl.uint8:
        keys, scales = _to_index_fp8(keys)
        keys = keys.to(tl.uint8, bitcast=True)
        tl.store(
            (block_ptr + BLOCK_SIZE * WIDTH).to(tl.pointer_type(tl.float32), bitcast=True) + offset,
            scales,
            mask=is_mine,
        )
    tl.store((block_ptr + offset * WIDTH)[:, None] + column[None, :], keys, mask=is_mine[:, None] & is_column[None, :])


def norm_rope_index_keys(
    keys: Tensor, index_cache: Tensor, slots: Tensor, norm: IndexNorm, rotation: IndexRotation
) -> None:
    """Compute `projections.norm_rope_index_keys` in one kernel.

    Raises:
        ValueError: The index cache's rows do not fit the keys, or its blocks are not contiguous.
    """
    num_tokens, width = keys.shape
    index_keys.check_index_cache(index_cache, keys.dtype if index_cache.dtype != torch.uint8 else torch.uint8, width)
    if num_tokens == 0:
        return
    cos_sin, interleaved, hadamard = rotation
    rows, sizes = _tile(num_tokens, width, cos_sin)
    keys_kernel[(triton.cdiv(num_tokens, rows),)](
        keys,
        index_cache,
        slots.contiguous(),
        norm.weight,
        norm.bias,
        None if cos_sin is None else cos_sin.contiguous(),
        num_tokens,
        keys.stride(0),
        index_cache.stride(0),
        norm.eps,
        BLOCK_SIZE=index_cache.shape[1],
        INTERLEAVED=interleaved,
        HADAMARD=hadamard,
        **sizes,
    )


@triton.jit(do_not_specialize=["num_tokens"])
def queries_kernel(
    q_ptr,
    weights_ptr,
    cos_sin_ptr,
    out_ptr,
    factors_ptr,
    num_tokens,
    q_stride_token,
    q_stride_head,
    weights_stride,
    factor,
    NUM_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROPE: tl.constexpr,
    ROWS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HADAMARD: tl.constexpr,
):
    """Rotate and quantize the queries of a tile of (token, head) rows; one program per tile."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head = row // NUM_HEADS, row % NUM_HEADS
    column = tl.arange(0, COLUMNS)[None, :]
    is_row = token < num_tokens
    mask = is_row[:, None] & (column < WIDTH)
    q = tl.load(q_ptr + (token * q_stride_token + head * q_stride_head)[:, None] + column, mask=mask, other=0.0)
    factors = tl.load(weights_ptr + token * weights_stride + head, mask=is_row, other=0.0).to(tl.float32) * factor
    if cos_sin_ptr is not None:
        q = _rotate(q, cos_sin_ptr, token[:, None], is_row[:, None], ROPE, INTERLEAVED)
    if HADAMARD:
        q = _transform(q, WIDTH)
    if out_ptr.dtype.element_ty == tl.float8e4nv:
        q, scales = _to_index_fp8(q)
        factors *= scales
    tl.store(out_ptr + row[:, None] * WIDTH + column, q, mask=mask)
    tl.store(factors_ptr + row, factors, mask=is_row)


def rope_index_queries(q: Tensor, weights: Tensor, rotation: IndexRotation, is_fp8: bool) -> tuple[Tensor, Tensor]:
    """Compute `projections.rope_index_queries` in one kernel."""
    num_tokens, num_heads, width = q.shape
    out = q.new_empty(q.shape, dtype=FP8 if is_fp8 else q.dtype)
    factors = weights.new_empty(weights.shape, dtype=torch.float32)
    if num_tokens == 0:
        return out, factors
    cos_sin, interleaved, hadamard = rotation
    rows, sizes = _tile(num_tokens, width, cos_sin)
    queries_kernel[(triton.cdiv(num_tokens * num_heads, rows),)](
        q,
        weights,
        None if cos_sin is None else cos_sin.contiguous(),
        out,
        factors,
        num_tokens,
        *q.stride()[:2],
        weights.stride(0),
        num_heads**-0.5 * width**-0.5,
        NUM_HEADS=num_heads,
        INTERLEAVED=interleaved,
        HADAMARD=hadamard,
        **sizes,
    )
    return out, factors


def _tile(num_tokens: int, width: int, cos_sin: Tensor | None) -> tuple[int, dict[str, int]]:
    """Return a program's number of rows, and the sizes of both kernels; tl.dot takes 16 rows and columns at least."""
    rows = min(_MAX_ROWS, max(16, triton.next_power_of_2(num_tokens)))
    columns, rope = max(16, triton.next_power_of_2(width)), 0 if cos_sin is None else cos_sin.shape[1]
    return rows, {"WIDTH": width, "COLUMNS": columns, "ROPE": rope, "ROWS": rows}
