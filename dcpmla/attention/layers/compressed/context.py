"""The rows that prefills of DeepSeek-V4's attention read from earlier steps and from other ranks (`ContextRows`)."""

from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from dcpmla.attention.backends.calls import decode_workspace
from dcpmla.attention.layers.compressed.cache import CompressedPlan
from dcpmla.attention.layers.compressed.config import LayerKind
from dcpmla.attention.step.chunks import ContextChunk, context_chunks
from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.upload import upload


@dataclass(frozen=True)
class ContextRows:
    """The rows that prefill tokens attend to, gathered for one layer: windows, new tokens and entries.

    Attributes:
        window_slots: Rows of the windows' tokens that earlier steps computed, in layers of each ring [num_rings, C]
            int64.
        first_position: Position of the first such token of each prefill token's request, [T] int32.
        first_row: Row of that token among the gathered rows, [T] int32.
        new_row: Row that a new token at position 0 of its request would have, [T] int32.
        chunks: Entries of all ranks, by their ratio and whether they are selected: each request's, from its first to
            the last that this step completes; none where entries stay (`CompressedConfig.moves_queries`).
        workspace: Memory from `decode_workspace`.
        kept: Lists that layers share (`lists.RowLists`).
    """

    window_slots: Tensor
    first_position: Tensor
    first_row: Tensor
    new_row: Tensor
    chunks: dict[tuple[int, bool], tuple[ContextChunk, ...]]
    workspace: Tensor | None
    kept: dict[Hashable, tuple[Tensor, ...]] = field(default_factory=dict)


def context_rows(step: StepMetadata) -> ContextRows | None:
    """Return the context of a step's prefills; None without prefills. A workspace is allocated if the step has none."""
    plan, requests, num_decodes = step.layout.traits.plan, step.requests, step.num_decodes
    if requests is None or num_decodes == len(requests.query_lens):
        return None
    new, end = np.asarray(requests.query_lens[num_decodes:]), np.asarray(requests.seq_lens[num_decodes:])
    start, ring = end - new, plan.ring_rows
    first = np.maximum(start - plan.config.sliding_window + 1, 0)  # first token that the first new token sees
    slots = [
        np.arange(begin, stop) % ring + state * ring
        for begin, stop, state in zip(first, start, requests.states[num_decodes:], strict=True)
    ]
    num_window = start - first
    window_start, new_start = np.cumsum(num_window) - num_window, np.cumsum(new) - new
    per_token = (
        np.repeat(x, new).astype(np.int32) for x in (first, window_start, num_window.sum() + new_start - start)
    )
    rings = np.arange(1 + max(plan.config.rings))[:, None] * plan.rows_per_ring
    columns = [*per_token, rings + np.concatenate(slots)]
    first_position, first_row, new_row, window_slots = upload(columns, step.layout.device)
    kinds = {(kind.ratio, kind.selects): kind for kind in plan.config.layer_kinds if kind.ratio}
    workspace = None if step.decode is None else step.decode.workspace
    return ContextRows(
        window_slots=window_slots,
        first_position=first_position,
        first_row=first_row,
        new_row=new_row,
        chunks={key: _chunks_of(step, plan, kind, int(new.sum()), end // kind.ratio) for key, kind in kinds.items()},
        workspace=decode_workspace(step.layout.device) if workspace is None else workspace,
    )


def _chunks_of(
    step: StepMetadata, plan: CompressedPlan, kind: LayerKind, num_tokens: int, num_entries: np.ndarray
) -> tuple[ContextChunk, ...]:
    """Return the chunks of prefills' entries, num_entries each, in layers of a kind; none where entries are selected
    and queries move instead. Numbers that are the same on all ranks decide.
    """
    layout, config = step.layout, plan.config
    selects = kind.selects and step.max_seq_len // kind.ratio > config.indexer.topk
    if selects and config.moves_queries(layout.dcp, num_tokens, int(num_entries.sum())):
        return ()
    table = step.table.block_table[step.num_decodes :] + plan.first_entry_block(kind.ratio)
    alignment, first = layout.owner.size * layout.owner.interleave, np.zeros_like(num_entries)
    return context_chunks(layout, plan.entries_per_block(kind.ratio), first, num_entries, alignment, table)
