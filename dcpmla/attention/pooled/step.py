"""The part of a step that layers of sparse MLA over pools read, and its builder."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dcpmla.attention.build import GraphRows, HostStep
from dcpmla.attention.linear.layout import DeltaMetadata
from dcpmla.attention.linear.step import HybridStepBuilder
from dcpmla.attention.pooled.cache import PooledPlan
from dcpmla.attention.pooled.entries import EntryLayout, Part, cut_parts
from dcpmla.attention.sparse.step import SelectedTokens, SparseMetadata, with_selection
from dcpmla.attention.step import StepMetadata
from dcpmla.config import DCPConfig
from dcpmla.indexer_config import IndexerConfig
from dcpmla.ownership import Owner


@dataclass(frozen=True)
class PoolMetadata:
    """The pools of a step's tokens.

    Attributes:
        num_sums: Copies of a request's sums of the pool in progress.
        owner: This rank, as the owner of pools.
        per_block: Pools of a block on one rank.
        parts: Parts that are added to the sums, in order; empty before `with_pools`.
        visible: Whole pools that each token may select from, as if they were tokens; None before `with_pools`.
        selection: Memory for the selected pools; None where no token has more pools before it than are selected.
    """

    num_sums: int
    owner: Owner
    per_block: int
    parts: tuple[Part, ...] = ()
    visible: SparseMetadata | None = None
    selection: SelectedTokens | None = None

    def of_tokens(self, index: int, size: int) -> "PoolMetadata":
        """Return metadata for a token of each request, as before `with_pools`."""
        return PoolMetadata(self.num_sums, self.owner, self.per_block)

    @property
    def entries(self) -> EntryLayout:
        """Return the layout of the pools' keys in the index cache."""
        assert self.visible is not None
        return EntryLayout(None, self.visible.block_table, self.per_block, self.owner)


class PooledStepBuilder(HybridStepBuilder):
    """Builder of one rank's steps over layers of linear attention and of sparse MLA over pools."""

    def __init__(
        self, plan: PooledPlan, dcp: DCPConfig, dcp_rank: int, device: torch.device | str, takes_chunks: bool
    ) -> None:
        super().__init__(plan, dcp, dcp_rank, device, takes_chunks)
        self._pools = PoolMetadata(plan.num_copies, self.owner, dcp.block_size // plan.latents.pool_size)

    def columns(self, host: HostStep) -> list[np.ndarray]:
        """Return the arrays of `HybridStepBuilder`, then three arrays for `SparseMetadata`."""
        seen = (host.positions + 1).astype(np.int32)
        return [*super().columns(host), host.request, seen, self.local_seq_lens(host.positions)]

    def extend(self, step: StepMetadata, host: HostStep, block_table: Tensor, arrays: Sequence[Tensor]) -> StepMetadata:
        """Return the step with its requests' states, and the tokens that each token may select from."""
        numbers, request, seq_lens, local_seq_lens = arrays
        step = super().extend(step, host, block_table, [numbers])
        sparse = SparseMetadata(block_table, request, seq_lens, local_seq_lens, max(host.requests.seq_lens))
        return step.with_kind(sparse).with_kind(self._pools)

    def extend_graph(self, step: StepMetadata, rows: GraphRows) -> StepMetadata:
        """Return the step of a decode graph with its requests' states, and the tokens that each row may select from."""
        numbers = rows.block_table, rows.request, rows.seq_lens, rows.local_seq_lens
        sparse = SparseMetadata(*numbers, rows.max_seq_len)
        return super().extend_graph(step, rows).with_kind(sparse).with_kind(self._pools)


def with_pools(step: StepMetadata, indexer: IndexerConfig) -> StepMetadata:
    """Return the step with its tokens' pools, and memory for a selection."""
    sparse, delta, pools = step.get(SparseMetadata), step.get(DeltaMetadata), step.get(PoolMetadata)
    if sparse is None or delta is None or pools is None:  # a step whose requests vary (`StepMetadata.vary`)
        return step
    start, first, end, state = delta.requests
    # Rows that repeat a request's last token hold nothing from linear attention, so their keys are in no pool.
    row = torch.arange(step.num_tokens, device=start.device) - start[sparse.request]
    positions = step.positions.where(row < (end - first)[sparse.request], -1)
    counts = sparse.seq_lens // indexer.pool_size
    local = pools.owner.local_seq_lens(counts)
    max_pools = sparse.max_seq_len // indexer.pool_size
    selects = sparse.max_seq_len > indexer.topk
    chosen = SelectedTokens.empty(step.num_tokens, indexer.num_pools, step.positions.device) if selects else None
    pools = replace(
        pools,
        parts=cut_parts((positions, sparse.request), (first, end, state), pools.num_sums, step.decode),
        visible=SparseMetadata(sparse.block_table, sparse.request, counts, local, max_pools),
        selection=chosen,
    )
    return with_selection(step, indexer.topk).with_kind(pools)
