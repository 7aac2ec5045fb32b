"""The layout of pools from vLLM's tensors. Nothing here imports vLLM."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dcpmla.attention.select.step import SelectedTokens, SparseMetadata
from dcpmla.config import DCPConfig
from dcpmla.integrations.absorbed import uniform_query_len
from dcpmla.integrations.vllm.sparse.layout import SelectionLayout


@dataclass(frozen=True)
class StepPools:
    """The pools of a step's tokens, in memory that stays: CUDA graphs read it.

    Attributes:
        tokens: Tokens that each token may select from.
        visible: Whole pools that each token may select from, as if they were tokens.
        slots: Slot of the pool that each token completes [T] int64; -1 if it completes none, or another rank's.
        num_before: Number of its request's tokens of this step before each token [T] int32.
        query_len: Number of new tokens of each request in a step of decodes; None for other steps.
        selection: Memory for selected pools.
    """

    tokens: SparseMetadata
    visible: SparseMetadata
    slots: Tensor
    num_before: Tensor
    query_len: int | None
    selection: SelectedTokens


class PoolLayout:
    """The pools that each token of a step completes, and the pools that it may select from.

    Args:
        tokens: Layout of the tokens.
        pools: Layout of the index cache, in pools (`sparse.layout.in_pools`).
        num_pools: Number of pools that a token selects.
        max_query_len: Most new tokens of a request in a step of decodes.
        max_num_tokens: Maximum tokens of a step.
        device: Device of the steps' tensors.
    """

    def __init__(
        self,
        tokens: SelectionLayout,
        pools: DCPConfig,
        num_pools: int,
        max_query_len: int,
        max_num_tokens: int,
        device: torch.device,
    ) -> None:
        self.tokens, self.pools, self.max_query_len = tokens, pools, max_query_len
        self.pool_size = tokens.dcp.block_size // pools.block_size
        self._index = torch.arange(max_num_tokens, dtype=torch.int32, device=device)
        self._columns = torch.zeros(3, max_num_tokens, dtype=torch.int32, device=device)
        self._slots = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self._selection = SelectedTokens.empty(max_num_tokens, num_pools, device)

    def build(self, step: Any) -> StepPools:
        """Lay out a step, without waiting for the device.

        Args:
            step: vLLM's metadata that all layers share (`CommonAttentionMetadata`).
        """
        tokens = self.tokens.build(step)
        num_tokens = len(tokens.request)
        num_visible, num_local, num_before = self._columns[:, :num_tokens]
        query_len = uniform_query_len(step.query_start_loc_cpu.numpy(), len(tokens.block_table), num_tokens)
        index = self._index[:num_tokens]
        if query_len is None:
            num_before.copy_(index - step.query_start_loc[tokens.request])
        else:
            num_before.copy_(index % query_len)
        counts = num_visible, num_local, tokens.max_seq_len // self.pool_size
        visible = SparseMetadata(tokens.block_table, tokens.request, *counts)
        is_decode = query_len is not None and query_len <= self.max_query_len
        selection, slots = self._selection.rows(slice(0, num_tokens)), self._slots[:num_tokens]
        pools = StepPools(tokens, visible, slots, num_before, query_len if is_decode else None, selection)
        self.update(pools)
        return pools

    def update(self, pools: StepPools) -> None:
        """Count pools again by the tokens' lengths and block tables, in place."""
        tokens, visible, layout = pools.tokens, pools.visible, self.pools
        owner = layout.owner(self.tokens.owner.rank)
        torch.div(tokens.seq_lens, self.pool_size, rounding_mode="floor", out=visible.seq_lens)
        local = owner.local_seq_lens(visible.seq_lens)
        visible.local_seq_lens.copy_(local)
        last = (visible.seq_lens - 1).clamp(min=0)
        index = owner.local_index(last)
        column = (index // layout.block_size).clamp(max=tokens.block_table.shape[1] - 1)
        slots = tokens.block_table[tokens.request, column] * layout.block_size + index % layout.block_size
        is_mine = owner.rank_of(last) == owner.rank
        is_complete = (tokens.seq_lens % self.pool_size == 0) & (tokens.seq_lens > 0)
        pools.slots.copy_(torch.where(is_mine & is_complete, slots, -1))
