"""The part of a step that layers of sparse MLA over pools read."""

from dataclasses import dataclass

import torch

from dcpmla.attention.select.entries import EntryLayout, PoolUpdate, pool_updates
from dcpmla.attention.select.step import SelectedTokens, SparseMetadata, with_selection
from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.indexer_config import IndexerConfig


@dataclass(frozen=True)
class PoolMetadata:
    """The pools of a step's tokens.

    Attributes:
        entries: Layout of the pools' keys in the index cache.
        parts: Parts that are added to the sums, in order.
        visible: Whole pools that each token may select from, as if they were tokens.
        selection: Memory for the selected pools; None where no token has more pools before it than are selected.
    """

    entries: EntryLayout
    parts: tuple[PoolUpdate, ...]
    visible: SparseMetadata
    selection: SelectedTokens | None


def with_pools(step: StepMetadata, indexer: IndexerConfig) -> StepMetadata:
    """Return the step with its tokens' pools, and memory for a selection."""
    if step.defer is not None:  # Pools are filled between graphs, with the step of each replay.
        return step
    step = with_selection(step, indexer.topk)
    layout, table, tokens = step.layout, step.table, step.tokens
    # Rows that repeat a request's last token hold nothing from linear attention, so their keys are in no pool.
    row = torch.arange(step.num_tokens, device=layout.device) - table.row_start[tokens.request]
    positions = tokens.positions.where(row < (table.end - table.begin)[tokens.request], -1)
    counts = tokens.seq_lens // indexer.pool_size
    lens = counts, layout.owner.local_seq_lens(counts), step.max_seq_len // indexer.pool_size
    selects = step.max_seq_len > indexer.topk
    return step.sharing(
        PoolMetadata(
            entries=EntryLayout(None, table.block_table, layout.dcp.block_size // indexer.pool_size, layout.owner),
            parts=pool_updates(step, positions),
            visible=SparseMetadata(table.block_table, tokens.request, *lens),
            selection=SelectedTokens.empty(step.num_tokens, indexer.num_pools, layout.device) if selects else None,
        )
    )
