"""The part of a step that layers of DeepSeek-V4's attention ask for: whose its tokens are, and which rows they see."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from dcpmla import ownership
from dcpmla.attention.compressed.cache import CompressedPlan
from dcpmla.attention.compressed.config import LayerKind
from dcpmla.attention.compressed.visible import visible_rows
from dcpmla.attention.sparse.step import SelectedTokens, SparseMetadata
from dcpmla.attention.step import ContextChunk, DecodeMetadata, StepMetadata, tokens_of


class Angles(NamedTuple):
    """The angles of RoPE (`apply_rope`), [T, R] float32 each.

    Attributes:
        window: Angles in layers that have a window alone.
        compressed: Angles in all other layers.
    """

    window: Tensor
    compressed: Tensor


class Entries(NamedTuple):
    """The entries of a step in all layers of one ratio.

    Attributes:
        cos_sin: [T, R] float32, the angles of the entry that each token belongs to: those of its first token.
        block_table: [num_reqs, max_blocks] int32 in blocks of a layer's rows, which begin with all windows.
        visible: those that each token may select from; None where no layer selects, and nothing is prefilled.
    """

    cos_sin: Tensor
    block_table: Tensor
    visible: SparseMetadata | None


@dataclass(frozen=True)
class ContextRows:
    """The rows that prefill tokens attend to, gathered for one layer: of windows, of new tokens, of entries.

    Attributes:
        window_slots: [C] int64, rows of the windows' tokens that were computed in earlier steps.
        first_position: [T] int32, of the first such token of each prefill token's request.
        first_row: [T] int32, its row among the gathered ones.
        new_row: [T] int32, the row that a new token at position 0 of its request would have.
        chunks: Entries of all ranks, by kind of layer: each request's, from its first to the last that this step
            completes. A kind has none where its entries stay on their ranks (`CompressedConfig.moves_queries`).
    """

    window_slots: Tensor
    first_position: Tensor
    first_row: Tensor
    new_row: Tensor
    chunks: dict[LayerKind, tuple[ContextChunk, ...]]


class Part(NamedTuple):
    """The part of each request's tokens that goes into its sums at once.

    Attributes:
        positions, request: Positions [T] int64 and requests [T] int32 of all tokens of the step.
        first_position, end: Bounds of its tokens [num_reqs] int32, equal if it has none.
        source, target: [num_reqs] int32, numbers of the sums before them and after; negative for padding.
    """

    positions: Tensor
    request: Tensor
    first_position: Tensor
    end: Tensor
    source: Tensor
    target: Tensor


class EntryLayout(NamedTuple):
    """The layout of a step's entries in a cache.

    Attributes:
        cos_sin: Angles of the entry that each token belongs to [T, R] float32.
        block_table: Block table [num_reqs, max_blocks] int32, in blocks of the cache.
        dcp_rank, dcp_size, interleave: Owners of the entries, as in `dcpmla.ownership`.
    """

    cos_sin: Tensor
    block_table: Tensor
    entries_per_block: int
    dcp_rank: int
    dcp_size: int
    interleave: int


@dataclass(frozen=True)
class CompressedMetadata:
    """The requests of a step, as layers with entries see them; T tokens, decodes and prefills alike.

    Attributes:
        plan: of the caches.
        dcp_rank: this rank's number in its group.
        positions: [T] int64.
        request: [T] int32, each token's request.
        first_position: [num_reqs] int32, of each request's first token in this step.
        seq_lens: [num_reqs] int32, tokens of each request after this step; 0 for padding.
        states: [num_reqs] int32, where the requests' states are; -1 for padding.
        block_table: [num_reqs, max_blocks] int32.
        max_seq_len: no less than any of seq_lens, and the same on all ranks.
        context: of the prefill tokens; None where there are none.
        angles: None before `with_angles`.
        entries: by ratio; empty before `with_angles`.
        parts: one after the other, what the compressors pool; empty before `with_angles`.
        decode_rows: by ratio, `visible_rows` of the decodes where nothing selects; empty before `with_angles`.
        selection: Memory for the entries that layers with an indexer select; None where they select nothing.
    """

    plan: CompressedPlan
    dcp_rank: int
    positions: Tensor
    request: Tensor
    first_position: Tensor
    seq_lens: Tensor
    states: Tensor
    block_table: Tensor
    max_seq_len: int
    context: ContextRows | None = None
    angles: Angles | None = None
    entries: dict[int, Entries] = field(default_factory=dict)
    parts: tuple[Part, ...] = ()
    decode_rows: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    selection: SelectedTokens | None = None

    @property
    def requests(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """positions, request, seq_lens and states, as `finish_rows` orders them."""
        return self.positions, self.request, self.seq_lens, self.states

    @property
    def layout(self) -> tuple[int, int, int]:
        """dcp_rank, dcp_size and interleave, as functions of `dcpmla.ownership` order them."""
        dcp = self.plan.dcp
        return self.dcp_rank, dcp.decode_context_parallel_size, dcp.cp_kv_cache_interleave_size

    def of_tokens(self, index: int, size: int) -> "CompressedMetadata":
        """Return the part of a step of each request's token of this index alone, where each brings size tokens."""
        positions, request = (tokens_of(column, index, size) for column in (self.positions, self.request))
        first = positions.to(torch.int32)
        seen = (first + 1).where(self.seq_lens > 0, 0)
        step = replace(self, positions=positions, request=request, first_position=first, seq_lens=seen)
        return replace(step, angles=None, entries={}, parts=(), decode_rows={}, selection=None)

    def parts_of(self, decode: DecodeMetadata | None) -> tuple[Part, ...]:
        """Return the parts of a step: one, or where tokens may be rejected the decodes' tokens one by one, for each of
        them leaves sums of its own; prefills are in the first.
        """
        first, end, num_sums = self.first_position, self.seq_lens, 1 + self.plan.num_drafts
        tokens = self.positions, self.request
        if num_sums == 1:
            return (Part(*tokens, first, end, self.states, self.states),)
        sums, num_decodes = self.states * num_sums, 0 if decode is None else len(decode.block_table)
        parts = []
        for _ in range(1 if decode is None else decode.max_query_len):
            part_end = torch.cat([torch.minimum(first + 1, end)[:num_decodes], end[num_decodes:]])
            source, target = sums + (first - 1) % num_sums, sums + (part_end - 1) % num_sums
            parts.append(Part(*tokens, first, part_end, source, target))
            first = part_end
        return tuple(parts)

    def max_entries(self, ratio: int) -> int:
        """Return no less than the entries that any token sees; the same on all ranks."""
        return self.max_seq_len // ratio

    def visible_entries(self, ratio: int) -> SparseMetadata:
        """Return the entries that each token sees, as the kernels of sparse MLA take tokens."""
        counts = (self.positions + 1) // ratio
        counts = counts.where(self.states[self.request] >= 0, 0)  # 0 for padding
        rank, size, interleave = self.layout
        local = ownership.local_seq_lens(counts, size, rank, interleave)
        return SparseMetadata(self.block_table, self.request, counts.to(torch.int32), local, self.max_entries(ratio))

    def entry_table(self, ratio: int) -> Tensor:
        """Return the block table in blocks of a layer's rows (`Entries.block_table`)."""
        return self.block_table + self.plan.window_rows // self.plan.entries_per_block(ratio)

    def visible_rows(self, tokens: slice, ratio: int) -> tuple[Tensor, Tensor]:
        """Return the rows that some tokens attend to on this rank where nothing selects: of their windows and of all
        entries that they see, those that count here.

        Args:
            ratio: 0 for a layer of windows alone, which exchanges nothing: each rank has all of them.
        Returns:
            [n, N] int32, anything after the last; [n] int32, how many.
        """
        return self._list_rows(tokens, ratio, self.layout if ratio else (0, 1, 1))

    def _list_rows(self, tokens: slice, ratio: int, layout: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
        per_block = self.plan.entries_per_block(ratio) if ratio else 1
        table = self.entry_table(ratio) if ratio else self.block_table
        sizes = ratio, per_block, self.plan.config.sliding_window, self.plan.ring_rows
        return visible_rows(self.positions[tokens], self.request[tokens], self.states, table, *sizes, *layout)

    def new_selection(self, num_decode_tokens: int) -> SelectedTokens:
        """Return memory for the entries that layers with an indexer select; slots begin with the decodes' windows."""
        topk = self.plan.config.indexer.topk
        windows, num_windows = self._list_rows(slice(0, num_decode_tokens), 0, self.layout)
        num_tokens, width = len(self.positions), windows.shape[1]
        slots = windows.new_empty(num_tokens, width + topk)
        slots[:num_decode_tokens, :width] = windows
        num_first = windows.new_zeros(num_tokens)
        num_first[:num_decode_tokens] = num_windows
        return SelectedTokens(windows.new_empty(num_tokens, topk), slots, torch.empty_like(num_first), num_first)


def with_angles(
    step: StepMetadata, rotary: Callable[[Tensor, bool], Tensor], kinds: Iterable[LayerKind] | None = None
) -> StepMetadata:
    """Return a step with what layers share: the angles of its tokens, the rows that its decodes see, and memory for
    what they select.

    Args:
        rotary: Function of positions [T] and of whether layers compress; returns cos_sin [T, R] float32 (`apply_rope`).
        kinds: of the layers that it is for; all of the plan's if None.
    """
    compressed = step.get(CompressedMetadata)
    if compressed is None:  # a step whose requests vary (`StepMetadata.vary`)
        return step
    kinds = dict.fromkeys(compressed.plan.config.layer_kinds if kinds is None else kinds)
    positions, decodes = step.positions, slice(0, step.num_decode_tokens)
    selecting = {kind.ratio for kind in kinds if selects(compressed, kind)}
    seen = {kind.ratio for kind in kinds if step.num_decode_tokens and not selects(compressed, kind)}
    ratios = {kind.ratio: None for kind in kinds if kind.ratio}
    window = rotary(positions, False)
    angles, entries = Angles(window, window), {}
    if ratios:
        firsts = torch.cat([positions, *(positions // ratio * ratio for ratio in ratios)])
        compressed_angles, *of_entries = rotary(firsts, True).split(len(positions))
        angles = Angles(window, compressed_angles)
        for ratio, cos_sin in zip(ratios, of_entries, strict=True):
            is_asked = ratio in selecting or compressed.context is not None
            visible = compressed.visible_entries(ratio) if is_asked else None
            entries[ratio] = Entries(cos_sin, compressed.entry_table(ratio), visible)
    return step.share(
        replace(
            compressed,
            angles=angles,
            entries=entries,
            parts=compressed.parts_of(step.decode) if entries else (),
            decode_rows={ratio: compressed.visible_rows(decodes, ratio) for ratio in seen},
            selection=compressed.new_selection(step.num_decode_tokens) if selecting else None,
        )
    )


def selects(step: CompressedMetadata, kind: LayerKind) -> bool:
    """Return whether tokens of a step may see more entries than a layer's indexer selects; the same on all ranks."""
    return kind.has_indexer and step.max_entries(kind.ratio) > step.plan.config.indexer.topk
