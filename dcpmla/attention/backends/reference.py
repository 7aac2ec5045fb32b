"""Attention in plain torch: the specification of every kernel, and the backend that works on any device.

Works in float32, or in float64 on float64 inputs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dcpmla.attention.backends.calls import DecodeCall, PrefillCall, join_keys
from dcpmla.attention.backends.deterministic_reference import MAX_PRODUCTS, decode_deterministic
from dcpmla.attention.backends.mask import unpack_mask
from dcpmla.cache import formats, shared_rows
from dcpmla.ownership import TILE

_MAX_SCORES = 1 << 25  # scores that mha_prefill holds at a time: 128 MiB of float32
_MAX_GATHERED = 1 << 28  # cache elements that mla_decode gathers at a time: 1 GiB of float32


def mla_decode(call: DecodeCall) -> tuple[Tensor, Tensor]:
    """Compute absorbed MLA over a paged latent cache, each query token by itself; `dcpmla.mla_decode` gives shapes."""
    table = token_tables(call)
    compute, num_rows, most = _decode_tile, table.shape[1] * call.block_size, _MAX_GATHERED
    if call.num_tile_lanes is not None:
        compute, num_rows, most = decode_deterministic, call.num_tile_lanes * call.q.shape[1] * TILE, MAX_PRODUCTS
    tile = max(1, most // max(1, num_rows * call.kv_cache.shape[2]))
    tiles = [slice(start, start + tile) for start in range(0, max(1, len(table)), tile)]
    out, lse = zip(*(compute(call, table[tokens], tokens) for tokens in tiles), strict=True)
    return torch.cat(out), torch.cat(lse)


def token_tables(call: DecodeCall) -> Tensor:
    """Return the block ids of each query token's request [T, max_blocks], int32."""
    table, token = call.block_table, torch.arange(len(call.q), dtype=torch.int32, device=call.q.device)
    request = token // call.max_query_len
    if call.query_start_loc is not None:
        request = torch.searchsorted(call.query_start_loc[1:], token, right=True).clamp(max=call.num_segments - 1)
    if call.request_index is not None:
        request = call.request_index[request]
    return table[request] if len(table) else table.new_zeros(len(token), table.shape[1])


def _decode_tile(call: DecodeCall, table: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
    """Compute a slice of a call's tokens, given their rows of the table."""
    dtype = torch.promote_types(call.out_dtype, torch.float32)
    q = call.q if call.q_pe is None else torch.cat([call.q, call.q_pe], -1)
    q, seq_lens = q[tokens].to(dtype), call.seq_lens[tokens]
    first_of_block = torch.arange(table.shape[1], device=q.device) * call.block_size
    # Entries after a request's last block are undefined.
    table = table.where(first_of_block < seq_lens[:, None], 0).to(torch.int64)
    if call.is_planar:
        kv = shared_rows.read_rows(call.kv_cache, table, call.kv_lora_rank, dtype)
    else:
        kv = formats.to_latents(call.kv_cache[table].flatten(1, 2), call.kv_lora_rank, call.kv_scale, dtype)
    valid = torch.arange(kv.shape[1], device=q.device) < seq_lens[:, None]
    kv = kv.masked_fill(~valid[..., None], 0.0)  # unwritten slots may hold NaN, and 0 x NaN is NaN
    q = q if call.q_scale is None else q * call.q_scale
    scores = torch.einsum("thd,tsd->ths", q, kv) * call.softmax_scale
    probs, lse = _softmax(scores.masked_fill(~valid[:, None], -torch.inf))
    return torch.einsum("ths,tsl->thl", probs, kv[..., : call.kv_lora_rank]).to(call.out_dtype), lse


def run_prefill(call: PrefillCall) -> tuple[Tensor, Tensor]:
    """Compute a `PrefillCall`."""
    bounds = call.queries.start, call.keys.start
    return mha_prefill(
        call.q, join_keys(call.k_nope, call.k_pe), call.v, *bounds, call.softmax_scale, call.causal, call.mask
    )


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
    """Compute multi-head attention of a ragged batch; `PrefillCall` gives shapes, with keys k [S, h, P + R]."""
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
    """Return probabilities [..., S] and float32 LSE [...] of scores; zeros and -inf where every score is -inf."""
    lse = scores.logsumexp(-1)
    probs = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    return probs, lse.to(torch.float32)
