"""The operations between projections, cache and attention: norms, RoPE, the cache write, W_UK absorbed into queries,
W_UV applied to outputs.

Most are custom ops (`torch.ops.dcpmla`) without gradients. The torch code here specifies them and runs on CPUs and in
float64. On GPUs kernels run instead, with two exceptions: a W_UV in the model's dtype, unless results are
deterministic, and weights in fp8 on GPUs that do not multiply in fp8.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from dcpmla.attention.projection_calls import LatentWrite, QueryAbsorption, ValueProjection
from dcpmla.cache.formats import to_fp8, write_latents
from dcpmla.comm.norm import rms_norm
from dcpmla.operators import is_float_on_gpu, nothing, operator
from dcpmla.parallel.fixed import fixed_linear, multiply_rows
from dcpmla.parallel.fp8 import dequantize_blocks, quantize_rows, runs_fp8
from dcpmla.parallel.quantized import empty_codes


def apply_rope(x: Tensor, cos_sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the last dim by each token's angles, in float32.

    Args:
        x: Values [T, R] or [T, h, R], any float dtype.
        cos_sin: Cosines of R / 2 angles, then their sines [T, R], float32, times YaRN's factor if there is one.
        interleaved: Whether pairs are (2i, 2i+1), GPT-J's layout; else (i, i + R/2), NeoX's.
    Returns:
        A tensor of x's shape and dtype; each rotated pair stays in the columns it came from.
    Source: RoFormer; the two layouts as in GPT-J and GPT-NeoX.
    """
    cos, sin = cos_sin.view(x.shape[0], *(1,) * (x.ndim - 2), x.shape[-1]).chunk(2, -1)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    first, second = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    rotated = first * cos - second * sin, second * cos + first * sin
    return (torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)).to(x.dtype)


@operator(
    "norm_rope_cache",
    kernel="dcpmla.attention.triton.projections:norm_rope_cache",
    fake=LatentWrite.new_results,
    mutates_args=("kv_cache",),
)
def norm_rope_cache(call: LatentWrite) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalize q_c and kv_c, rotate k_pe, and write the latents that this rank owns into the cache.

    Returns:
        q_c [T, Lq] after its norm; latents [T, L + R] before cache rounding: kv_c after its norm, k_pe rotated; codes
        and scales of q_c, with 0 columns unless quantizes, because an op always returns the same number of tensors.
    Source: DeepSeek-V2, section 2.1; norms round where transformers' do (`rms_norm`).
    """
    down, kv_cache, slots, q_weight, kv_weight, eps, kv_lora_scale, cos_sin, rope_interleaved, *_ = call
    q_rank = 0 if q_weight is None else len(q_weight)
    q_c, kv_c, k_pe = down.tensor_split((q_rank, q_rank + len(kv_weight)), -1)
    kv_c = rms_norm(kv_c, kv_weight, eps) * kv_lora_scale
    if call.k_pe_weight is not None:
        k_pe = rms_norm(k_pe, call.k_pe_weight, eps)
    if cos_sin is not None:
        k_pe = apply_rope(k_pe, cos_sin, rope_interleaved)
    write_latents(kv_cache, kv_c, k_pe, slots, call.kv_scale)
    q_c = q_c.clone() if q_weight is None else rms_norm(q_c, q_weight, eps)
    return q_c, torch.cat([kv_c, k_pe], -1), *(quantize_rows(q_c) if call.quantizes else empty_codes(q_c, False))


@operator(
    "absorb_query",
    kernel="dcpmla.attention.triton.projections:absorb_query",
    fake=QueryAbsorption.new_query,
    runs=lambda call: is_float_on_gpu(call) and (call.w_scales is None or runs_fp8(call.q.device)),
)
def absorb_query(call: QueryAbsorption) -> Tensor:
    """Return the query of attention over latents, [q_nope W_UK | q_pe rotated], [T, H, L + R]."""
    q, w_uk, cos_sin, rope_interleaved, q_scale, w_scales, is_deterministic = call
    w_uk = w_uk if w_scales is None else dequantize_blocks(w_uk, w_scales, q.dtype)
    q_nope, q_pe = q.tensor_split((w_uk.shape[1],), -1)
    if cos_sin is not None:
        q_pe = apply_rope(q_pe, cos_sin, rope_interleaved)
    if is_deterministic:
        ql_nope = multiply_rows(q_nope, w_uk.transpose(1, 2)).to(q.dtype)
    else:
        ql_nope = torch.bmm(q_nope.transpose(0, 1), w_uk).transpose(0, 1)
    absorbed = torch.cat([ql_nope, q_pe], -1)
    return absorbed if q_scale is None else to_fp8(absorbed, q_scale)


def project_latents(kv_c: Tensor, w_kv_b: Tensor, is_deterministic: bool) -> Tensor:
    """Return the nope part of keys and values [S, h (P + V)] of latents [S, L], by a weight [h, P + V, L].

    Args:
        is_deterministic: Whether a row's bits depend on no other row.
    """
    weight = w_kv_b.flatten(0, 1)
    return fixed_linear(kv_c, weight, kv_c.dtype) if is_deterministic else F.linear(kv_c, weight)


@operator("rotate_query_", kernel="dcpmla.attention.triton.rope:rotate_query_", fake=nothing, mutates_args=("q",))
def rotate_query_(q: Tensor, cos_sin: Tensor, rope_interleaved: bool) -> None:
    """Rotate the last R columns of q [T, h, P + R] in place, as `apply_rope` by cos_sin [T, R]."""
    q_pe = q[..., q.shape[-1] - cos_sin.shape[-1] :]
    q_pe.copy_(apply_rope(q_pe, cos_sin, rope_interleaved))


@operator(
    "project_values",
    kernel="dcpmla.attention.output.kernels:project_values",
    fake=ValueProjection.new_values,
    runs=lambda call: (
        (call.w_scales is not None or call.is_deterministic) and is_float_on_gpu(call) and runs_fp8(call.out.device)
    ),
)
def project_values(call: ValueProjection) -> Tensor:
    """Turn attention over latents into values [T, H V]."""
    values = call.out.new_empty(len(call.out), call.w_uv.shape[0] * call.w_uv.shape[1])
    project_into(call, values)
    return values


def project_into(call: ValueProjection, values: Tensor) -> None:
    """Compute `project_values` by plain torch, into values [T, h V] with stride 1 along a row."""
    out, w_uv, w_scales, is_deterministic = call
    w_uv = w_uv if w_scales is None else dequantize_blocks(w_uv, w_scales, out.dtype)
    if is_deterministic:
        values.copy_(multiply_rows(out, w_uv).flatten(1))
        return
    # A matrix product writes into any result with stride 1 along its rows, so no transposition is copied.
    torch.bmm(out.transpose(0, 1), w_uv.transpose(1, 2), out=values.view(-1, *w_uv.shape[:2]).transpose(0, 1))
