"""Triton kernels of RoPE with their launcher; `attention/projections.py` specifies them."""

import triton
import triton.language as tl
from torch import Tensor

_TOKENS = tl.constexpr(16)  # tokens per program


@triton.jit
def load_pairs(x_ptr, mask, ROPE: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Load rows of ROPE columns as the first and the second element of each pair, both [N, PAIRS].

    x_ptr and mask are [N, 1].
    """
    if INTERLEAVED:  # whole rows, in wide loads
        column = tl.arange(0, 2 * PAIRS)[None, :]
        row = tl.load(x_ptr + column, mask=mask & (column < ROPE), other=0.0)
        x, y = tl.split(tl.reshape(row, [row.shape[0], PAIRS, 2]))
    else:
        pair = tl.arange(0, PAIRS)[None, :]
        is_pair = mask & (pair < ROPE // 2)
        x = tl.load(x_ptr + pair, mask=is_pair, other=0.0)
        y = tl.load(x_ptr + ROPE // 2 + pair, mask=is_pair, other=0.0)
    return x, y


@triton.jit
def rotate(x_ptr, cos_sin_ptr, token, mask, ROPE: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Rotate rows of ROPE columns by their tokens' angles in float32; without angles, load them as they are.

    Pointers, token and mask are [N, 1]. Returns the first and the second element of each pair, both [N, PAIRS].
    """
    x, y = load_pairs(x_ptr, mask, ROPE, PAIRS, INTERLEAVED)
    return rotate_pairs(x, y, cos_sin_ptr, token, mask, ROPE, PAIRS)


@triton.jit
def rotate_pairs(x, y, cos_sin_ptr, token, mask, ROPE: tl.constexpr, PAIRS: tl.constexpr):
    """Rotate pairs that are loaded already (`rotate`)."""
    pair = tl.arange(0, PAIRS)[None, :]
    is_pair = mask & (pair < ROPE // 2)
    if cos_sin_ptr is not None:
        cos = tl.load(cos_sin_ptr + token * ROPE + pair, mask=is_pair, other=0.0)
        sin = tl.load(cos_sin_ptr + token * ROPE + ROPE // 2 + pair, mask=is_pair, other=0.0)
        wide_x, wide_y = x.to(tl.float32), y.to(tl.float32)
        x = (wide_x * cos - wide_y * sin).to(x.dtype)
        y = (wide_y * cos + wide_x * sin).to(y.dtype)
    return x, y


@triton.jit
def store_pairs(out_ptr, x, y, mask, ROPE: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Store pairs, as `load_pairs` returns them, as rows of ROPE columns."""
    if INTERLEAVED:
        column = tl.arange(0, 2 * PAIRS)[None, :]
        tl.store(out_ptr + column, tl.interleave(x, y), mask=mask & (column < ROPE))
    else:
        pair = tl.arange(0, PAIRS)[None, :]
        tl.store(out_ptr + pair, x, mask=mask & (pair < ROPE // 2))
        tl.store(out_ptr + ROPE // 2 + pair, y, mask=mask & (pair < ROPE // 2))


@triton.jit
def norm_factor(x, y, WIDTH, eps):
    """Return the factors [N, 1] float32 of the RMS norm of rows given as pairs [N, PAIRS]."""
    x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / WIDTH + eps)[:, None]


@triton.jit
def rotate_range(x, y, cos_sin_ptr, mask, sign, FIRST: tl.constexpr, ROPE: tl.constexpr):
    """Rotate ROPE / 2 of the pairs [N, PAIRS], from FIRST on, by the angles at cos_sin_ptr [N, 1] times sign."""
    pair = tl.arange(0, x.shape[1])[None, :] - FIRST
    is_rotated = (pair >= 0) & (pair < ROPE // 2)
    cos = tl.load(cos_sin_ptr + pair, mask=mask & is_rotated, other=0.0)
    sin = tl.load(cos_sin_ptr + ROPE // 2 + pair, mask=mask & is_rotated, other=0.0) * sign
    wide_x, wide_y = x.to(tl.float32), y.to(tl.float32)
    rotated_x, rotated_y = wide_x * cos - wide_y * sin, wide_y * cos + wide_x * sin
    return tl.where(is_rotated, rotated_x.to(x.dtype), x), tl.where(is_rotated, rotated_y.to(y.dtype), y)


@triton.jit(do_not_specialize=["num_tokens"])
def rotate_kernel(
    x_ptr,
    cos_sin_ptr,
    num_tokens,
    stride_token,
    stride_head,
    ROPE: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Rotate in place; one program per (tile of tokens, head)."""
    token = (tl.program_id(0) * _TOKENS + tl.arange(0, _TOKENS)).to(tl.int64)[:, None]
    x_ptr += token * stride_token + tl.program_id(1).to(tl.int64) * stride_head
    x, y = rotate(x_ptr, cos_sin_ptr, token, token < num_tokens, ROPE, PAIRS, INTERLEAVED)
    store_pairs(x_ptr, x, y, token < num_tokens, ROPE, PAIRS, INTERLEAVED)


def rotate_query_(q: Tensor, cos_sin: Tensor, rope_interleaved: bool) -> None:
    """Compute `projections.rotate_query_` in one kernel."""
    num_tokens, num_heads, width = q.shape
    rope = cos_sin.shape[1]
    rotate_kernel[(triton.cdiv(num_tokens, _TOKENS.value), num_heads)](
        q[..., width - rope :],
        cos_sin.contiguous(),
        num_tokens,
        *q.stride()[:2],
        ROPE=rope,
        PAIRS=triton.next_power_of_2(rope // 2),
        INTERLEAVED=rope_interleaved,
        num_warps=1,  # in place: a row must be loaded whole before it is stored
    )
