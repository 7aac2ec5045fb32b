"""The layout of pools from vLLM's tensors. Nothing here imports vLLM."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dcpmla.attention.select.step import SelectedTokens, SparseMetadata
from dcpmla.attention.step.metadata import lay_out
from dcpmla.attention.step.table import StepTokens
from dcpmla.integrations.absorbed import table_of_lengths, uniform_query_len
from dcpmla.integrations.vllm.sparse.layout import SelectionLayout


@dataclass(frozen=True)
class StepPools:
    """The pools of a step's tokens. Of decodes, all but num_before is in memory that stays: CUDA graphs read it.

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
        pool_size: Tokens of a pool, which are on one rank, in one block (`sparse.layout.in_pools`).
        num_pools: Number of pools that a token selects.
        max_query_len: Most new tokens of a request in a step of decodes.
        max_num_tokens: Maximum tokens of a step.
    """

    def __init__(
        self, tokens: SelectionLayout, pool_size: int, num_pools: int, max_query_len: int, max_num_tokens: int
    ) -> None:
        self.tokens, self.pool_size, self.max_query_len = tokens, pool_size, max_query_len
        device = tokens.layout.device
        self._pools = StepTokens.empty(max_num_tokens, device)
        self._selection = SelectedTokens.empty(max_num_tokens, num_pools, device)

    def build(self, step: Any) -> StepPools:
        """Lay out a step, without waiting for the device.

        Args:
            step: vLLM's metadata that all layers share (`CommonAttentionMetadata`).
        """
        tokens = self.tokens.build(step)
        num_tokens = len(tokens.request)
        self._count(tokens, step.seq_lens, step.query_start_loc)
        counts = self._pools.front(num_tokens)
        per_token = tokens.request, counts.seq_lens, counts.local_seq_lens
        visible = SparseMetadata(tokens.block_table, *per_token, tokens.max_seq_len // self.pool_size)
        num_before = self.tokens.index[:num_tokens] - step.query_start_loc[tokens.request]
        query_len = uniform_query_len(step.query_start_loc_cpu.numpy(), len(tokens.block_table), num_tokens)
        is_decode = query_len is not None and query_len <= self.max_query_len
        selection = self._selection.rows(slice(0, num_tokens))
        return StepPools(tokens, visible, counts.slots, num_before, query_len if is_decode else None, selection)

    def update(self, pools: StepPools) -> None:
        """Count pools again, in place, by lengths and block tables of requests with one token each."""
        tokens = pools.tokens
        self._count(tokens, tokens.seq_lens, self.tokens.index[: len(tokens.seq_lens) + 1])

    def _count(self, tokens: SparseMetadata, seq_lens: Tensor, row_start: Tensor) -> None:
        """Write the pools that each token sees, and the slot of the pool that it completes.

        Args:
            seq_lens, row_start: Arguments of `table_of_lengths`.
        """
        pools = self._pools.front(len(tokens.request))
        lay_out(table_of_lengths(seq_lens, row_start, tokens.block_table), pools, self.tokens.layout)
        # A pool's tokens are on one rank, in consecutive slots.
        pools.slots.floor_divide_(self.pool_size).masked_fill_(pools.seq_lens % self.pool_size > 0, -1)
        pools.seq_lens.floor_divide_(self.pool_size)
        pools.local_seq_lens.floor_divide_(self.pool_size)
