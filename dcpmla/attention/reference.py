"""Attention in plain torch: the specification of every kernel, and the backend that works on any device.

Works in float32, or in float64 on float64 inputs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dcpmla.attention.sparse.mask import unpack_mask
from dcpmla.cache import formats

_MAX_SCORES = 1 << 25  # scores that mha_prefill holds at a time: 128 MiB of float32
_MAX_GATHERED = 1 << 28  # cache elements that mla_decode gathers at a time: 1 GiB of float32


def mla_decode(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    kv_lora_rank: int,
    query_start_loc: Tensor | None,
    max_query_len: int,
    workspace: Tensor | None = None,
    kv_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Absorbed MLA over a paged latent cache, each query token by itself; `dcpmla.mla_decode` documents shapes."""
    num_tokens, num_reqs = q.shape[0], block_table.shape[0]
    token = torch.arange(num_tokens, device=q.device)
    request = (
        token // max_query_len
        if query_start_loc is None
        else torch.searchsorted(query_start_loc[1:], token, right=True)
    )
    table = (
        block_table[request.clamp(max=num_reqs - 1)]
        if num_reqs
        else block_table.new_zeros(num_tokens, block_table.shape[1])
    )
    tile = max(1, _MAX_GATHERED // max(1, table.shape[1] * kv_cache.shape[1] * kv_cache.shape[2]))
    tiles = [
        _decode_tile(
            q[rows], kv_cache, table[rows], seq_lens[rows], scale, kv_lora_rank, kv_scale, q_scale, dtype or q.dtype
        )
        for rows in (slice(start, start + tile) for start in range(0, max(1, num_tokens), tile))
    ]
    out, lse = zip(*tiles, strict=True)
    return torch.cat(out), torch.cat(lse)


def _decode_tile(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    kv_lora_rank: int,
    kv_scale: Tensor | None,
    q_scale: Tensor | None,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(out_dtype, torch.float32)
    first_of_block = torch.arange(block_table.shape[1], device=q.device) * kv_cache.shape[1]
    block_table = block_table.where(
        first_of_block < seq_lens[:, None], 0
    )  # behind a request's last block stands anything
    kv = formats.dequantize(kv_cache[block_table.to(torch.int64)].flatten(1, 2), kv_lora_rank, kv_scale, dtype)
    valid = torch.arange(kv.shape[1], device=q.device) < seq_lens[:, None]
    kv = kv.masked_fill(~valid[..., None], 0.0)  # slots that nobody wrote may hold NaN, and 0 x NaN is NaN
    q = q.to(dtype) if q_scale is None else q.to(dtype) * q_scale
    scores = torch.einsum("thd,tsd->ths", q, kv) * scale
    probs, lse = _softmax(scores.masked_fill(~valid[:, None], -torch.inf))
    return torch.einsum("ths,tsl->thl", probs, kv[..., :kv_lora_rank]).to(out_dtype), lse


def mha_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start: Sequence[int],
    key_start: Sequence[int],
    scale: float,
    causal: bool,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of a ragged batch; `dcpmla.attention.prefill_backends.Prefill` documents shapes."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    out, lse = q.new_zeros(*q.shape[:2], v.shape[-1]), q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    for request in range(len(query_start) - 1):
        keys = slice(key_start[request], key_start[request + 1])
        if keys.start == keys.stop:
            continue
        k_t, v_t = k[keys].to(dtype).permute(1, 2, 0), v[keys].to(dtype).transpose(0, 1)
        tile = max(1, _MAX_SCORES // (q.shape[1] * (keys.stop - keys.start)))
        first, last = query_start[request], query_start[request + 1]
        for start in range(first, last, tile):
            rows = slice(start, min(start + tile, last))
            num_keys = rows.stop - first if causal else keys.stop - keys.start
            scores = q[rows].to(dtype).transpose(0, 1) @ k_t[..., :num_keys] * scale
            if causal:
                scores += torch.full(scores.shape[1:], -torch.inf, dtype=dtype, device=q.device).triu(start - first + 1)
            if mask is not None:
                scores = scores.masked_fill(~unpack_mask(mask[rows], num_keys), -torch.inf)
            probs, row_lse = _softmax(scores)
            out[rows] = (probs @ v_t[:, :num_keys]).transpose(0, 1).to(out.dtype)
            lse[rows] = row_lse.transpose(0, 1)
    return out, lse


def _softmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    """[..., S] -> probabilities and float32 LSE [...]; zeros and -inf where every score is -inf."""
    lse = scores.logsumexp(-1)
    probs = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    return probs, lse.to(torch.float32)
