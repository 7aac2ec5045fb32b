"""The operations between the indexer's projections, its cache and its scores: norm, RoPE, Hadamard transform, rounding
to e4m3.

Custom ops (`torch.ops.dcpmla`). The torch code here specifies them and runs on CPUs and in float64; GPUs run the
kernels of `attention/select/kernels/projections.py`. The rotated dims come first here, unlike in attention's own heads.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from dcpmla.attention.projections import apply_rope
from dcpmla.attention.select.calls import IndexNorm, IndexRotation
from dcpmla.cache.formats import FP8
from dcpmla.cache.index_keys import index_to_fp8, write_index_keys
from dcpmla.operators import nothing, operator


@operator(
    "norm_rope_index_keys",
    kernel="dcpmla.attention.select.kernels.projections:norm_rope_index_keys",
    fake=nothing,
    mutates_args=("index_cache",),
)
def norm_rope_index_keys(
    keys: Tensor, index_cache: Tensor, slots: Tensor, norm: IndexNorm, rotation: IndexRotation
) -> None:
    """Normalize and rotate the indexer's keys, and write the rows that this rank owns into the cache.

    Args:
        keys: [T, D], projected from the hidden states or from entries; contiguous columns.
        index_cache: [num_blocks, block_size, width] in one of the formats of `dcpmla.cache.index_keys`, written at the
            slots.
        slots: [T] int64, -1 where another rank owns the token.
        norm, rotation: Norm and rotation of the keys.
    Source: DeepSeek-V3.2's and V4.1's indexers; rounded to the dtype of keys where transformers' models round.
    """
    wide = torch.promote_types(keys.dtype, torch.float32)
    weight, bias, eps = norm
    if bias is None:
        normed = F.rms_norm(keys.to(wide), keys.shape[1:], weight.to(wide), eps)
    else:
        normed = F.layer_norm(keys.to(wide), keys.shape[1:], weight.to(wide), bias.to(wide), eps)
    write_index_keys(index_cache, _rotate(normed.to(keys.dtype), rotation), slots)


@operator(
    "rope_index_queries",
    kernel="dcpmla.attention.select.kernels.projections:rope_index_queries",
    fake=lambda q, weights, _, is_fp8: (
        q.new_empty(q.shape, dtype=FP8 if is_fp8 else q.dtype),
        weights.new_empty(weights.shape, dtype=torch.float32),
    ),
)
def rope_index_queries(q: Tensor, weights: Tensor, rotation: IndexRotation, is_fp8: bool) -> tuple[Tensor, Tensor]:
    """Return the indexer's queries rotated, and their heads' weights with all factors of a score.

    Args:
        q: [T, H, D], projected from the query latent.
        weights: [T, H], projected from the hidden states; contiguous columns.
        rotation: Rotation of the queries, the same as of the keys.
        is_fp8: Whether queries are rounded to e4m3, with a scale per head that is multiplied into its weight.
    Returns:
        q [T, H, D] in the dtype given, or e4m3; weights [T, H] float32, times 1 / sqrt(H D) and the queries' scales.
    Source: DeepSeek-V3.2's indexer.
    """
    factors = weights.float() * (q.shape[1] ** -0.5 * q.shape[2] ** -0.5)
    q = _rotate(q, rotation)
    if not is_fp8:
        return q.clone(), factors
    codes, scales = index_to_fp8(q)
    return codes, factors * scales


def hadamard_matrix(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return [size, size] of +-1 over sqrt(size), for a power of two: symmetric, and its own inverse.

    Source: Sylvester's construction.
    """
    matrix = torch.ones(1, 1, dtype=dtype, device=device)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix * size**-0.5


def _rotate(x: Tensor, rotation: IndexRotation) -> Tensor:
    cos_sin, interleaved, hadamard = rotation
    if cos_sin is not None:
        rope, rest = x.tensor_split((cos_sin.shape[1],), -1)
        x = torch.cat([apply_rope(rope, cos_sin, interleaved), rest], -1)
    if not hadamard:
        return x
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) @ hadamard_matrix(x.shape[-1], wide, x.device)).to(x.dtype)
