"""Prefill: new tokens attend to themselves, then to their cached context chunk by chunk, each rank for its own heads."""

import torch
from torch import Tensor
from torch.nn import functional as F

from dcpmla.attention.metadata import PrefillMetadata
from dcpmla.attention.prefill_backends import select_prefill
from dcpmla.attention.segments import Segments
from dcpmla.cache.latent import read_latents
from dcpmla.comm.exchange import Exchange
from dcpmla.merge import merge_partials


def dcp_mla_prefill(
    q: Tensor, kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, w_kv_b: Tensor, prefill: PrefillMetadata, scale: float, exchange: Exchange
) -> tuple[Tensor, Tensor]:
    """Multi-head attention of prefill tokens over themselves and over a context cached on all ranks of the DCP group. Collective.

    No merge across ranks is needed: after the gather each rank has all keys for its own heads.

    Args:
        q: [T, h, P + R], rotated.
        kv_c, k_pe: [T, L] after its norm, [T, R] rotated: the new tokens' own latents.
        kv_cache: [num_blocks, block_size, L + R], this rank's tokens.
        w_kv_b: [h, P + V, L], the up-projection of this rank's heads, W_UK over W_UV.
    Returns:
        out [T, h, V] in the dtype of q, lse [T, h] float32.
    """
    qk_nope_head_dim = q.shape[-1] - k_pe.shape[-1]
    k_nope, v = up_project(kv_c, w_kv_b, qk_nope_head_dim)
    attend = select_prefill(q, k_pe, v).load()
    queries = Segments(prefill.query_start, prefill.query_start_loc)
    out, lse = attend(q, k_nope, k_pe, v, queries, queries, scale, causal=True)
    if prefill.context_chunks:
        out = out.to(torch.promote_types(q.dtype, torch.float32))  # rounded once, behind the last chunk, not once a chunk
    for chunk in prefill.context_chunks:
        latents = exchange.gather_context(read_latents(kv_cache, chunk.local_slots), chunk.order).to(q.dtype)
        context_kv_c, context_k_pe = latents.split([kv_c.shape[-1], k_pe.shape[-1]], -1)
        k_nope, v = up_project(context_kv_c, w_kv_b, qk_nope_head_dim)
        keys = Segments(chunk.key_start, chunk.key_start_loc)
        out, lse = _merge(out, lse, *attend(q, k_nope, context_k_pe, v, queries, keys, scale, causal=False))
    return out.to(q.dtype), lse


def up_project(kv_c: Tensor, w_kv_b: Tensor, qk_nope_head_dim: int) -> tuple[Tensor, Tensor]:
    """Latents -> the nope part of keys, and values, of this rank's heads.

    Args:
        kv_c: [S, L].
        w_kv_b: [h, P + V, L] with P = qk_nope_head_dim.
    Returns:
        k_nope [S, h, P] and v [S, h, V], views of one [S, h, P + V].
    """
    kv = F.linear(kv_c, w_kv_b.flatten(0, 1)).unflatten(-1, w_kv_b.shape[:2])
    k_nope, v = kv.tensor_split((qk_nope_head_dim,), -1)
    return k_nope, v


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """`merge_partials` of what there is and one more part; on a GPU in the place of what there is."""
    if not out.is_cuda:
        return merge_partials(torch.stack([out, part.to(out.dtype)]), torch.stack([lse, part_lse]))
    from dcpmla.attention.kernels.merge import merge_into  # triton is there on Linux only

    merge_into(out, lse, part, part_lse)
    return out, lse
