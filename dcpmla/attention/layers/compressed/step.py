"""The part of a step that layers of DeepSeek-V4's attention need: its tokens' requests and visible rows."""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dcpmla.attention.backends.calls import decode_workspace
from dcpmla.attention.layers.compressed.cache import CompressedPlan
from dcpmla.attention.layers.compressed.calls import VisibleTokens
from dcpmla.attention.layers.compressed.config import LayerKind
from dcpmla.attention.layers.compressed.visible import RingWindows, ring_states, visible_in_rings, visible_rows
from dcpmla.attention.select.entries import PoolUpdate, pool_updates
from dcpmla.attention.select.step import SelectedTokens, SparseMetadata
from dcpmla.attention.step.chunks import ContextChunk, context_chunks
from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.attention.step.table import StepTraits
from dcpmla.ownership import Owner
from dcpmla.upload import upload


class Entries(NamedTuple):
    """The entries of a step in all layers of one ratio.

    Attributes:
        cos_sin: Angles of each token's entry, that is, of the entry's first token, [T, R] float32.
        block_table: Block table [num_reqs, max_blocks] int32 in blocks of a layer's rows, which begin with all windows.
        visible: Entries that each token may select from; None if no layer selects and nothing is prefilled.
    """

    cos_sin: Tensor
    block_table: Tensor
    visible: SparseMetadata | None


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
        kept: Lists that layers share (`prefill.RowLists`).
    """

    window_slots: Tensor
    first_position: Tensor
    first_row: Tensor
    new_row: Tensor
    chunks: dict[tuple[int, bool], tuple[ContextChunk, ...]]
    workspace: Tensor | None
    kept: dict[Hashable, tuple[Tensor, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class CompressedMetadata:
    """The requests of a step for layers with entries; T tokens, decodes and prefills alike.

    Attributes:
        plan: Plan of the caches.
        owner: This rank, as the owner of entries.
        positions: Position of each token, [T] int64.
        request: Request of each token, [T] int32.
        first_position: Position of each request's first token in this step, [num_reqs] int32.
        seq_lens: Tokens of each request after this step, [num_reqs] int32; 0 for padding.
        states: Number of each request's windows in a layer's rows, by the layer's ring [num_rings, num_reqs] int32;
            the first ring's are the requests' states. Negative for padding.
        block_table: Block table, [num_reqs, max_blocks] int32.
        max_seq_len: Upper bound of seq_lens, the same on all ranks.
        context: Rows for the prefill tokens; None without prefills.
        angles: Angles of the tokens (`apply_rope`) [T, R] float32, by whether a layer has entries; empty before
            `with_angles`.
        entries: Entries by ratio; empty before `with_angles`.
        parts: Parts that the compressors pool, in order; empty before `with_angles`.
        decode_rows: Results of `visible_rows` for decodes in layers without selection, by `LayerKind.seen`; empty
            before `with_angles`.
        selection: Memory for the entries that layers with an indexer select; None if they select nothing.
        windows: Windows of decodes in layers that share rows and select; None without such layers.
        candidates: Memory for candidate blocks [T, num_blocks] int32, -1 after the last; None while all blocks are.
    """

    plan: CompressedPlan
    owner: Owner
    positions: Tensor
    request: Tensor
    first_position: Tensor
    seq_lens: Tensor
    states: Tensor
    block_table: Tensor
    max_seq_len: int
    context: ContextRows | None = None
    angles: dict[bool, Tensor] = field(default_factory=dict)
    entries: dict[int, Entries] = field(default_factory=dict)
    parts: tuple[PoolUpdate, ...] = ()
    decode_rows: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    selection: SelectedTokens | None = None
    windows: RingWindows | None = None
    candidates: Tensor | None = None

    @classmethod
    def of(cls, step: StepMetadata) -> "CompressedMetadata":
        """Return the requests of a step, before `with_angles`."""
        plan: CompressedPlan = step.layout.traits.plan
        table, tokens = step.table, step.tokens
        num_rings = 1 + max(plan.config.rings)
        states = table.states[None] if num_rings == 1 else ring_states(table.states, num_rings, plan.num_states)
        numbers = tokens.positions, tokens.request, table.begin, table.end, states, table.block_table
        context = step.derive(ContextRows, context_rows)
        return cls(plan, step.layout.owner, *numbers, step.max_seq_len, context)

    def decode_slots(self, selection: SelectedTokens, num_decode_tokens: int, ring: int) -> Tensor:
        """Return the slots of a selection's decodes in a layer's rows [n, N]."""
        if self.windows is None or not ring:
            return selection.slots[:num_decode_tokens]
        return self.windows.slots_in(ring, selection)

    def max_entries(self, ratio: int) -> int:
        """Return an upper bound on the entries that any token sees; the same on all ranks."""
        return self.max_seq_len // ratio

    def visible_entries(self, ratio: int) -> SparseMetadata:
        """Return the entries that each token sees, in the format of sparse MLA's tokens."""
        counts = (self.positions + 1) // ratio
        counts = counts.where(self.states[0, self.request] >= 0, 0)  # 0 for padding
        local = self.owner.local_seq_lens(counts)
        return SparseMetadata(self.block_table, self.request, counts.to(torch.int32), local, self.max_entries(ratio))

    def entry_table(self, ratio: int) -> Tensor:
        """Return the block table in blocks of a layer's rows (`Entries.block_table`)."""
        return self.block_table + self.plan.first_entry_block(ratio)

    def visible_rows(
        self, tokens: slice, ratio: int, owner: Owner, num_rings: int = 1, block: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return the rows that some tokens attend to without selection: a rank's rows of their windows and of all
        entries that they see.

        Args:
            ratio: Ratio of the layer; 0 for windows alone.
            owner: This rank, among the ranks that share the rows.
            num_rings: Number of layers that share the layer's rows (`visible_in_rings`).
            block: Number of a request's last tokens that see each other and the window before them (`LayerKind`).
        Returns:
            Rows of each layer [num_rings, n, N] int32, arbitrary after the last; their number [num_rings, n] int32.
        """
        per_block = self.plan.entries_per_block(ratio) if ratio else 1
        table = self.entry_table(ratio) if ratio else self.block_table
        sizes = ratio, per_block, self.plan.config.sliding_window + block, self.plan.ring_rows
        positions, request = self.positions[tokens], self.request[tokens]
        if block:  # Every token sees what the block's last one does.
            positions = (self.seq_lens - 1).clamp(min=0)[request].long()
        call = VisibleTokens(positions, request, self.states[0], table, *sizes, owner)
        if num_rings > 1:
            return visible_in_rings(call._replace(states=self.states[:num_rings]))
        rows, num = visible_rows(call)
        return rows[None], num[None]

    def new_selection(self, num_decode_tokens: int) -> tuple[SelectedTokens, RingWindows | None]:
        """Return memory for the entries that layers with an indexer select, whose slots begin with the decodes' windows
        in the first ring, and their windows in all rings; None for one ring.
        """
        topk, num_rings = self.plan.config.indexer.topk, len(self.states)
        windows, num_windows = self.visible_rows(slice(0, num_decode_tokens), 0, self.owner, num_rings)
        num_tokens, width = len(self.positions), windows.shape[2]
        slots = windows.new_empty(num_tokens, width + topk)
        slots[:num_decode_tokens, :width] = windows[0]
        num_first = windows.new_zeros(num_tokens)
        num_first[:num_decode_tokens] = num_windows[0]
        positions = windows.new_empty(num_tokens, topk)
        selection = SelectedTokens(positions, slots, torch.empty_like(num_first), num_first)
        return selection, RingWindows.of(windows, selection) if num_rings > 1 else None

    def new_candidates(self, kinds: Iterable[LayerKind]) -> Tensor | None:
        """Return memory for candidate blocks; None if no token has other blocks."""
        candidates = self.plan.config.candidates
        ratio = next((kind.ratio for kind in kinds if kind.candidates), 0)
        if candidates is None or not ratio or self.max_entries(ratio) <= candidates.num_blocks * candidates.block_size:
            return None
        return self.request.new_empty(len(self.positions), candidates.num_blocks)


def with_angles(
    step: StepMetadata, rotary: Callable[[Tensor, bool], Tensor], kinds: Iterable[LayerKind] | None = None
) -> StepMetadata:
    """Return a step with data that layers share: its tokens' angles, the rows that its decodes see, and memory for
    selected entries.

    Args:
        rotary: Function of positions [T] and of whether layers compress; returns cos_sin [T, R] float32 (`apply_rope`).
        kinds: Kinds of the layers that run the step; None for all of the plan's.
    """
    if step.defer is not None:  # Layers run between graphs, with the step of each replay.
        return step
    compressed = CompressedMetadata.of(step)
    config = compressed.plan.config
    kinds = dict.fromkeys(config.layer_kinds if kinds is None else kinds)
    positions, num_decodes = step.tokens.positions, step.num_decode_tokens
    decodes = slice(0, num_decodes)
    selecting = {kind.ratio for kind in kinds if selects(compressed, kind)}
    seen = {kind.seen for kind in kinds if num_decodes and not selects(compressed, kind)}
    ratios = {kind.ratio: None for kind in kinds if kind.ratio}
    angles, entries = {False: rotary(positions, False)}, {}
    if ratios:
        firsts = torch.cat([positions, *(positions // ratio * ratio for ratio in ratios)])
        angles[True], *of_entries = rotary(firsts, True).split(len(positions))
        for ratio, cos_sin in zip(ratios, of_entries, strict=True):
            is_asked = ratio in selecting or compressed.context is not None
            visible = compressed.visible_entries(ratio) if is_asked else None
            entries[ratio] = Entries(cos_sin, compressed.entry_table(ratio), visible)
    selection, windows = compressed.new_selection(num_decodes) if selecting else (None, None)
    return step.sharing(
        replace(
            compressed,
            angles=angles,
            entries=entries,
            parts=pool_updates(step, positions) if entries else (),
            # Every rank reads all of a window without entries, so such layers exchange nothing.
            decode_rows={
                (ratio, block): compressed.visible_rows(
                    decodes, ratio, compressed.owner if ratio else Owner(), config.num_rings(ratio), block
                )
                for ratio, block in seen
            },
            selection=selection,
            windows=windows,
            candidates=compressed.new_candidates(kinds),
        )
    )


def selects(step: CompressedMetadata, kind: LayerKind) -> bool:
    """Return whether tokens of a step may see more entries than a layer's indexer selects; the same on all ranks."""
    return kind.selects and step.max_entries(kind.ratio) > step.plan.config.indexer.topk


def compressed_traits(plan: CompressedPlan) -> StepTraits:
    """Return what steps over windows and entries depend on. A decode reads its window after its tokens are written, so
    all but one token need rows in addition to the window's.
    """
    return StepTraits(
        plan=plan,
        block_tokens=plan.block_tokens,
        num_states=plan.num_states,
        has_slots=False,
        absorbs_pieces=False,
        has_static_decodes=False,
        max_decode_len=plan.ring_rows - plan.config.sliding_window + 1,
    )


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
