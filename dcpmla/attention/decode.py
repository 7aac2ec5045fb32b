"""Decode: one query token a request, all heads of the DCP group over this rank's tokens, merged across ranks."""

from torch import Tensor

from dcpmla.attention.backends import select_backend
from dcpmla.comm.exchange import Exchange


def mla_decode(
    q: Tensor, kv_cache: Tensor, block_table: Tensor, seq_lens: Tensor, scale: float, kv_lora_rank: int = 512
) -> tuple[Tensor, Tensor]:
    """Attention of absorbed queries over a paged latent cache on one rank.

    Args:
        q: [T, H, kv_lora_rank + rope], one query token a request: [ql_nope | q_pe].
        kv_cache: [num_blocks, block_size, kv_lora_rank + rope].
        block_table: [T, max_blocks] int32, block ids of each request.
        seq_lens: [T] int32, tokens of each request in this cache (under DCP: on this rank); all of them are attended to.
        scale: factor of the scores.
        kv_lora_rank: width of the latent, which is the value.
    Returns:
        out [T, H, kv_lora_rank] in the dtype of q, lse [T, H] float32 natural log; (0, -inf) for a request without tokens.
    Raises:
        ValueError: shapes that do not belong together.
    Source: DeepSeek-V2, section 2.1 (the up-projections absorbed into query and output).
    """
    if q.ndim != 3 or not 0 < kv_lora_rank <= q.shape[-1]:
        raise ValueError(f"q has shape {tuple(q.shape)}; expected [T, H, kv_lora_rank + rope] with kv_lora_rank {kv_lora_rank}")
    if kv_cache.ndim != 3 or kv_cache.shape[-1] != q.shape[-1]:
        raise ValueError(f"kv_cache has shape {tuple(kv_cache.shape)}; expected [num_blocks, block_size, {q.shape[-1]}] to match q")
    if block_table.ndim != 2 or block_table.shape[0] != q.shape[0]:
        raise ValueError(f"block_table has shape {tuple(block_table.shape)}; expected [{q.shape[0]}, max_blocks], a row for each query")
    if tuple(seq_lens.shape) != (q.shape[0],):
        raise ValueError(f"seq_lens has shape {tuple(seq_lens.shape)}; expected [{q.shape[0]}], one for each query")
    return select_backend(q.device).decode(q, kv_cache, block_table, seq_lens, scale, kv_lora_rank)


def dcp_mla_decode(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    local_seq_lens: Tensor,
    scale: float,
    exchange: Exchange,
    kv_lora_rank: int = 512,
) -> tuple[Tensor, Tensor]:
    """`mla_decode` over a cache that is sharded over the DCP group. Collective.

    Args:
        q: [T, h, kv_lora_rank + rope], this rank's heads.
        local_seq_lens: [T] int32, tokens of each request on this rank; the other arguments are those of `mla_decode`.
    Returns:
        out [T, h, kv_lora_rank], lse [T, h] float32: this rank's heads over all ranks' tokens.
    """
    q = exchange.gather_heads(q)
    out, lse = mla_decode(q, kv_cache, block_table, local_seq_lens, scale, kv_lora_rank)
    return exchange.combine(out, lse)
