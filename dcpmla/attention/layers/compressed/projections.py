"""The operations between projections, cache and attention of DeepSeek-V4: norms, RoPE and its inverse, the window, the
sink.

Custom ops (`torch.ops.dcpmla`). The torch code here specifies them and runs on CPUs and in float64; GPUs run the
kernels of `attention/layers/compressed/kernels/projections.py`. Columns that are rotated come last.
"""

import torch
from torch import Tensor

from dcpmla.attention.layers.compressed.calls import WindowWrite
from dcpmla.attention.projections import apply_rope
from dcpmla.cache.formats import FP8
from dcpmla.cache.index_keys import index_to_fp8
from dcpmla.cache.shared_rows import read_rows, write_rows
from dcpmla.operators import nothing, operator
from dcpmla.parallel.formats import BLOCK
from dcpmla.parallel.fp8 import quantize_rows
from dcpmla.parallel.quantized import empty_codes

GROUP = BLOCK  # columns of an fp8 output that share a scale
Rows = tuple[Tensor, Tensor, Tensor, Tensor]


@operator(
    "norm_rope_window",
    kernel="dcpmla.attention.layers.compressed.kernels.projections:norm_rope_window",
    fake=WindowWrite.new_results,
    mutates_args=("cache",),
)
def norm_rope_window(call: WindowWrite) -> Rows:
    """Normalize the query latent and the shared row of each token, rotate the row, and write it into its window.

    Returns:
        q_c [T, Lq] after its norm; rows [T, D] as attention reads them: rounded as the cache rounds them; codes and
        scales of q_c, without columns unless quantizes.
    Source: DeepSeek-V4's reference code; norms with the roundings of transformers' model.
    """
    down, cache, q_weight, kv_weight, eps, cos_sin, positions, request, seq_lens, states, ring_rows, quantizes = call
    q_c, rows = down.split([len(q_weight), len(kv_weight)], -1)
    q_c, rows = rms_norm(q_c, eps, q_weight), rotate(rms_norm(rows, eps, kv_weight), cos_sin)
    state, is_kept = states[request], seq_lens[request] - positions <= ring_rows
    slots = (state * ring_rows + positions % ring_rows).where(is_kept & (state >= 0), -1)
    write_rows(cache, rows, slots)
    if cache.dtype == torch.uint8:
        page = cache.new_empty(-(-len(rows) // cache.shape[1]), *cache.shape[1:])
        everywhere = torch.arange(len(rows), device=rows.device)
        write_rows(page, rows, everywhere)
        rows = read_rows(page, everywhere, rows.shape[1], rows.dtype)
    return q_c, rows, *(quantize_rows(q_c) if quantizes else empty_codes(q_c, False))


@operator(
    "norm_rope_query_",
    kernel="dcpmla.attention.layers.compressed.kernels.projections:norm_rope_query_",
    fake=nothing,
    mutates_args=("q",),
)
def norm_rope_query_(q: Tensor, eps: float | None, cos_sin: Tensor) -> None:
    """Normalize each head of q [T, h, D], without a weight, and rotate its last columns by cos_sin [T, R], in place; an
    eps of None is for no norm.
    """
    q.copy_(rotate(q if eps is None else rms_norm(q, eps), cos_sin))


@operator(
    "unrope_heads",
    kernel="dcpmla.attention.layers.compressed.kernels.projections:unrope_heads",
    fake=lambda out, _lse, _sinks, _cos_sin, quantizes: (
        out.new_empty(out.shape, dtype=FP8 if quantizes else out.dtype),
        out.new_empty(*out.shape[:2], out.shape[2] // GROUP if quantizes else 0, dtype=torch.float32),
    ),
)
def unrope_heads(out: Tensor, lse: Tensor, sinks: Tensor, cos_sin: Tensor, quantizes: bool) -> tuple[Tensor, Tensor]:
    """Return attention's output with the sink in its denominator, rotated back at the positions of its queries.

    Args:
        out: [T, h, D], merged over all ranks' rows.
        lse: [T, h] float32, natural log.
        sinks: [h] float32, logits that take probability and give no value.
        cos_sin: [T, R] float32 as in `apply_rope`.
        quantizes: Whether the output is quantized to e4m3, for an output projection in fp8.
    Returns:
        [T, h, D] in the dtype of out, or e4m3; scales [T, h, D / 128] float32 of groups of 128 columns, each the
        smallest power of two without saturation, without columns unless quantizes.
    Raises:
        ValueError: D is not whole groups, and quantizes.
    Source: DeepSeek-V4's report, section 2.3.3.
    """
    if quantizes and out.shape[2] % GROUP:
        raise ValueError(f"out has rows of {out.shape[2]} columns; expected a multiple of {GROUP}")
    wide = out.to(torch.promote_types(out.dtype, torch.float32))
    share = torch.exp(lse - torch.logaddexp(lse, sinks))[..., None]
    cos, sin = cos_sin.chunk(2, -1)
    heads = rotate((wide * share).where(share > 0, 0.0), torch.cat([cos, -sin], -1)).to(out.dtype)
    if not quantizes:
        return heads, lse.new_empty(*lse.shape, 0, dtype=torch.float32)
    codes, scales = index_to_fp8(heads.unflatten(-1, (-1, GROUP)))
    return codes.flatten(-2), scales


def rms_norm(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    """Normalize x [.., N] in float32 at least, rounded where transformers' model rounds: after the weight [N] where
    there is one, else the factor.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return x * factor.to(x.dtype) if weight is None else (weight * (wide * factor)).to(x.dtype)


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate the last R columns of x [T, .., D] by cos_sin [T, R] as pairs of neighbours."""
    nope, rope = x.tensor_split((x.shape[-1] - cos_sin.shape[-1],), -1)
    return torch.cat([nope, apply_rope(rope, cos_sin, True)], -1)
