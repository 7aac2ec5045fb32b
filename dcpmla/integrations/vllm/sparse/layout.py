"""The layout of a selection from vLLM's tensors. Nothing here imports vLLM."""

from dataclasses import replace
from typing import Any

import torch

from dcpmla.attention.select.step import SparseMetadata
from dcpmla.attention.step.metadata import lay_out
from dcpmla.attention.step.table import StepLayout, StepTokens
from dcpmla.config import DCPConfig
from dcpmla.integrations.absorbed import table_of_lengths


class SelectionLayout:
    """The tokens that each token of a step may select from, in memory that stays: CUDA graphs read it.

    Args:
        layout: Layout of the cache over the ranks.
        max_num_tokens: Maximum tokens of a step.
    Attributes:
        index: The numbers [0, max_num_tokens], int32.
    """

    def __init__(self, layout: StepLayout, max_num_tokens: int) -> None:
        self.layout = layout
        self.index = torch.arange(max_num_tokens + 1, dtype=torch.int32, device=layout.device)
        self._tokens = StepTokens.empty(max_num_tokens, layout.device)

    def build(self, step: Any) -> SparseMetadata:
        """Lay out a step, without waiting for the device.

        Args:
            step: vLLM's metadata that all layers share (`CommonAttentionMetadata`).
        """
        num_tokens, longest, seq_lens = step.num_actual_tokens, step.max_seq_len, step.seq_lens
        # Blocks that no request has would only make the scores wider.
        table = step.block_table_tensor[:, : max(1, -(-longest // self.layout.block_tokens))]
        if num_tokens == len(table):  # one token a request, padding included
            local = seq_lens if self.layout.owner.size == 1 else step.dcp_local_seq_lens
            return SparseMetadata(table, self.index[:num_tokens], seq_lens, local, longest)
        tokens = self._tokens.front(num_tokens)
        lay_out(table_of_lengths(seq_lens, step.query_start_loc, table), tokens, self.layout)
        return SparseMetadata(table, tokens.request, tokens.seq_lens, tokens.local_seq_lens, longest)


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
