"""The layout of a selection from vLLM's tensors. Nothing here imports vLLM."""

from dataclasses import replace
from typing import Any

import torch

from dcpmla.attention.select.step import SparseMetadata
from dcpmla.config import DCPConfig
from dcpmla.integrations.absorbed import tokens_seen, uniform_query_len


class SelectionLayout:
    """The tokens that each token of a step may select from, in memory that stays: CUDA graphs read it.

    Args:
        dcp: Layout of the cache.
        dcp_rank: Rank in the DCP group.
        max_num_tokens: Maximum tokens of a step.
        device: Device of the steps' tensors.
    """

    def __init__(self, dcp: DCPConfig, dcp_rank: int, max_num_tokens: int, device: torch.device) -> None:
        self.dcp, self.owner = dcp, dcp.owner(dcp_rank)
        self._arange = torch.arange(max_num_tokens, dtype=torch.int32, device=device)
        self._columns = torch.zeros(3, max_num_tokens, dtype=torch.int32, device=device)

    def build(self, step: Any) -> SparseMetadata:
        """Lay out a step, without waiting for the device.

        Args:
            step: vLLM's metadata that all layers share (`CommonAttentionMetadata`).
        """
        num_tokens, longest, seq_lens = step.num_actual_tokens, step.max_seq_len, step.seq_lens
        # Blocks that no request has would only make the scores wider.
        table = step.block_table_tensor[:, : max(1, -(-longest // self.dcp.virtual_block_size))]
        query_len = uniform_query_len(step.query_start_loc_cpu.numpy(), len(table), num_tokens)
        if query_len == 1:
            local = seq_lens if self.owner.size == 1 else step.dcp_local_seq_lens
            return SparseMetadata(table, self._arange[:num_tokens], seq_lens, local, longest)
        request, seen = tokens_seen(seq_lens, step.query_start_loc, query_len, num_tokens)
        seen = seen.clamp(min=0)
        local = self.owner.local_seq_lens(seen)
        kept = [
            column[:num_tokens].copy_(values)
            for column, values in zip(self._columns, (request, seen, local), strict=True)
        ]
        return SparseMetadata(table, kept[0], kept[1], kept[2], longest)


def in_pools(dcp: DCPConfig, pool_size: int) -> DCPConfig:
    """Return the layout of an index cache that has a key for each pool of tokens; a pool is on its tokens' rank.

    Raises:
        ValueError: Pools do not fit into the blocks, or into the groups of tokens that are on one rank.
    """
    if pool_size == 1:
        return dcp
    if dcp.block_size % pool_size:
        raise ValueError(
            f"block_size (--block-size) is {dcp.block_size}; it must be a multiple of {pool_size}, the tokens of a "
            "pool (the config's index_kpool)"
        )
    if dcp.decode_context_parallel_size == 1:
        return replace(dcp, block_size=dcp.block_size // pool_size, cp_kv_cache_interleave_size=1)
    interleave, remainder = divmod(dcp.cp_kv_cache_interleave_size, pool_size)
    if remainder or not interleave:
        raise ValueError(
            f"cp_kv_cache_interleave_size (--cp-kv-cache-interleave-size) is {dcp.cp_kv_cache_interleave_size}; it "
            f"must be a multiple of {pool_size}, the tokens of a pool (the config's index_kpool)"
        )
    return replace(dcp, block_size=dcp.block_size // pool_size, cp_kv_cache_interleave_size=interleave)
