"""Triton kernel of the factors of queries with its launcher; `attention/head_factors.py` specifies it."""

import triton
import triton.language as tl
from torch import Tensor

_HEADS = tl.constexpr(8)  # heads per program


@triton.jit
def scale_kernel(
    q_ptr,
    logs_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    num_heads,
    q_stride_token,
    q_stride_head,
    WIDTH: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Multiply heads of a token by their factors, rounded after each operation as in plain torch."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * _HEADS + tl.arange(0, _HEADS))[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    is_head = head < num_heads
    scale = tl.load(scale_ptr + head, mask=is_head, other=0.0)
    bias = tl.load(bias_ptr + head, mask=is_head, other=0.0)
    grown = (tl.load(logs_ptr + token).to(tl.float32) * scale.to(tl.float32)).to(scale.dtype)
    factor = (grown.to(tl.float32) + bias.to(tl.float32)).to(scale.dtype)
    q_ptr += token * q_stride_token + head * q_stride_head
    q = tl.load(q_ptr + column, mask=is_head & (column < WIDTH), other=0.0)
    out = (q.to(tl.float32) * factor.to(tl.float32)).to(q.dtype)
    out_ptr += (token * num_heads + head) * OUT_WIDTH
    tl.store(out_ptr + column, out, mask=is_head & (column < OUT_WIDTH))


def scale_queries(q: Tensor, logs: Tensor, scale: Tensor, bias: Tensor, padding: int) -> Tensor:
    """Compute `head_factors.scale_queries` in one kernel."""
    num_tokens, num_heads, width = q.shape
    out = q.new_empty(num_tokens, num_heads, width + padding)
    scale_kernel[(num_tokens, triton.cdiv(num_heads, _HEADS.value))](
        q,
        logs,
        scale,
        bias,
        out,
        num_heads,
        *q.stride()[:2],
        WIDTH=width,
        OUT_WIDTH=width + padding,
        COLUMNS=triton.next_power_of_2(width + padding),
    )
    return out
