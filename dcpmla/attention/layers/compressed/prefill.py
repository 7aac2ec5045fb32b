"""Prefill over windows and entries, bounded in memory. Each rank gathers entries chunk by chunk and attends with its
own heads alone, or entries stay and queries of all heads are sent to the entries' ranks.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dcpmla.attention.backends.calls import DecodeCall, decode_workspace
from dcpmla.attention.layers.compressed.calls import ChunkEntries
from dcpmla.attention.layers.compressed.config import LayerKind
from dcpmla.attention.layers.compressed.step import CompressedMetadata
from dcpmla.attention.layers.compressed.visible import append_entries
from dcpmla.attention.layers.compressed.weights import CompressedWeights
from dcpmla.attention.mla.decode import dcp_mla_decode, mla_decode
from dcpmla.attention.mla.prefill import ContextGather, merge_part
from dcpmla.attention.select.step import SelectedTokens
from dcpmla.attention.step.chunks import ContextChunk
from dcpmla.attention.step.metadata import PART_ROWS
from dcpmla.cache.shared_rows import read_rows
from dcpmla.comm.exchange import Exchange
from dcpmla.config import DCPConfig

KEPT_ROWS = 1 << 21  # most row numbers that a step keeps for its next layers
LISTED_ROWS = 1 << 23  # row numbers that are listed at a time
_Tensors = tuple[Tensor, ...]


def attend_prefill(
    q: Tensor,
    new_rows: tuple[Tensor, Tensor],
    rows: Tensor,
    step: CompressedMetadata,
    kind: LayerKind,
    selection: SelectedTokens | None,
    exchange: Exchange,
    dcp: DCPConfig,
) -> list[tuple[Tensor, Tensor]]:
    """Attend from prefill tokens to their windows and to entries of all ranks. Collective.

    Args:
        q: Queries of this rank's heads [T, h, D].
        new_rows: Rows of windows from earlier steps [C, D], and rows of the new tokens [T, D].
        rows: Cache of this layer (`cache/shared_format.py`), including this rank's entries of this step's tokens.
        selection: Selected entries of each token; None where tokens attend to all entries before them.
    Returns:
        out [n, h, D] and lse [n, h] float32, without the sink, of each tile of n tokens.
    """
    lists = RowLists(step, kind, selection, len(q))
    prefill = _Prefill(q, new_rows, rows, step, lists, exchange, dcp)
    return prefill.attend_gathered() if selection is None or lists.chunks else prefill.attend_in_place(selection)


def touch_prefill_memory(layer: CompressedWeights, exchange: Exchange, num_tokens: int) -> None:
    """Allocate and free the memory of `attend_prefill` for num_tokens. Collective."""
    config, dcp, dtype, num_heads = layer.config, layer.dcp, layer.dtype, layer.num_heads
    device = layer.q_norm.device

    def new(num_rows: int) -> Tensor:
        return torch.empty(num_rows, config.head_dim, dtype=dtype, device=device)

    num_entries = dcp.context_workspace_tokens if layer.kind.ratio else 0
    # The workspace has an aligned chunk for each request of a step, which brings a window without its last token.
    num_requests = min(num_tokens, dcp.context_workspace_tokens // config.chunk_alignment(dcp))
    num_before = num_requests * (config.sliding_window - 1)
    num_rows = min(num_tokens * num_heads * dcp.decode_context_parallel_size, PART_ROWS)
    touched = [
        # Queries and outputs, which are float32 until the last chunk.
        new(3 * num_tokens * num_heads),
        # A tile's gathered queries, and its outputs before and in the exchange.
        new(4 * num_rows),
        # Windows are read, then joined with new rows and a chunk.
        new(2 * num_before + num_tokens + num_entries),
        # Row numbers of entries are joined with row numbers of windows. Some are kept for the next layers.
        torch.empty(2 * LISTED_ROWS + KEPT_ROWS, dtype=torch.int32, device=device),
        decode_workspace(device),
    ]
    if layer.kind.ratio:
        exchange.reserve_context(num_entries, config.head_dim, dtype, device)
    del touched  # after the exchange's memory, because the allocator's peak counts


class RowLists:
    """Lists of rows for the prefill tokens of a step.

    Gathered rows belong to windows from earlier steps, to new tokens, then to a chunk's entries. All layers list the
    same rows, except for selected entries. So lists of all tokens at a time are kept in the step's context: small steps
    would spend more time on lists than on attention.

    Args:
        step: Step with prefills.
        kind: Kind of the layer.
        selection: Selected entries of each token; None where tokens attend to all entries before them.
        num_tokens: Number of prefill tokens, the step's last ones.
    Attributes:
        chunks: Entries that the layer gathers.
    """

    def __init__(
        self, step: CompressedMetadata, kind: LayerKind, selection: SelectedTokens | None, num_tokens: int
    ) -> None:
        assert step.context is not None
        self._step, self._context, self._selection, self._num_tokens = step, step.context, selection, num_tokens
        self._first = len(step.positions) - num_tokens  # number of tokens before the prefills
        self._window = step.plan.config.sliding_window
        self._entries = kind.ratio, kind.selects
        self.chunks: Sequence[ContextChunk] = step.context.chunks.get(self._entries, ())

    def list_rows(self, tokens: slice, number: int | None, num_before: int) -> _Tensors:
        """Return the rows [n, N] int32 of some tokens' windows and entries, and their number [n] int32.

        Args:
            number: Number of the chunk whose entries were gathered; None for windows alone.
            num_before: Number of rows before the chunk's; 0 if windows are left out.
        """
        if number is None:
            return self._kept("windows", tokens, lambda: self._list_windows(tokens))
        if self._selection is not None:
            return self._append(tokens, number, self._selection.positions[tokens], num_before)

        def append() -> _Tensors:
            first, *_ = self._bounds(tokens, number, num_before)
            listed = torch.arange(max(self.chunks[number].keys.lens), dtype=torch.int32, device=first.device)
            return self._append(tokens, number, first[:, None] + listed, num_before)

        return self._kept(("entries", self._entries, number), tokens, append)

    def num_listed(self, chunk: ContextChunk) -> int:
        """Return the maximum entries of a chunk that are listed for a token."""
        return max(chunk.keys.lens) if self._selection is None else self._selection.positions.shape[1]

    def _append(self, tokens: slice, number: int, entries: Tensor, num_before: int) -> _Tensors:
        """Return the lists of windows with entries [n, N] appended."""
        if num_before:
            rows, num = self.list_rows(tokens, None, num_before)
        else:
            request = self._requests(tokens)
            rows, num = request.new_empty(len(request), 0), torch.zeros_like(request)
        return append_entries(rows, num, entries, ChunkEntries(*self._bounds(tokens, number, num_before)))

    def _bounds(self, tokens: slice, number: int, num_before: int) -> _Tensors:
        """Return the first of a chunk's entries that each token may attend to, the end, and the first one's row."""

        def find() -> _Tensors:
            chunk, visible = self.chunks[number], self._step.entries[self._entries[0]].visible
            assert visible is not None
            request = self._requests(tokens) - self._step.request[self._first]  # among the prefills
            first, base = chunk.first_position[request], chunk.keys.start_loc[request]
            end = first + chunk.keys.start_loc[request + 1] - base
            return first, torch.minimum(visible.seq_lens[self._first :][tokens], end), base + num_before

        return self._kept(("bounds", self._entries, number), tokens, find)

    def _list_windows(self, tokens: slice) -> _Tensors:
        context, request = self._context, self._requests(tokens)
        positions = self._step.positions[self._first :][tokens]
        num = (positions + 1).clamp(max=self._window).to(torch.int32)
        position = (positions + 1 - num)[:, None] + torch.arange(self._window, device=positions.device)
        first_row, first_position = context.first_row[tokens, None], context.first_position[tokens, None]
        is_new = position >= self._step.first_position[request][:, None]
        rows = torch.where(is_new, context.new_row[tokens, None] + position, first_row + position - first_position)
        return rows.to(torch.int32), num

    def _requests(self, tokens: slice) -> Tensor:
        return self._step.request[self._first :][tokens]

    def _kept(self, key: Hashable, tokens: slice, compute: Callable[[], _Tensors]) -> _Tensors:
        """Return what compute returns, or what an earlier layer kept. Lists of all tokens are kept while there is
        room.
        """
        kept, is_whole = self._context.kept, tokens.stop - tokens.start == self._num_tokens
        if is_whole and key in kept:
            return kept[key]
        tensors = compute()
        if is_whole and sum(each.numel() for part in (*kept.values(), tensors) for each in part) <= KEPT_ROWS:
            kept[key] = tensors
        return tensors


@dataclass(frozen=True)
class _Prefill:
    """The prefill tokens of a step; arguments of `attend_prefill`.

    Attributes:
        lists: Lists of the rows that tokens attend to.
    """

    q: Tensor
    new_rows: tuple[Tensor, Tensor]
    rows: Tensor
    step: CompressedMetadata
    lists: RowLists
    exchange: Exchange
    dcp: DCPConfig

    def attend_gathered(self) -> list[tuple[Tensor, Tensor]]:
        """Attend to windows and to chunks of entries: return out and lse of each tile of tokens.

        Windows come with the first chunk, so that short contexts take one call of attention. Each later chunk is
        gathered during the attention to the previous chunk.
        """
        chunks, dtype, num_new = self.lists.chunks, self.q.dtype, sum(map(len, self.new_rows))
        # Results of several chunks are in float32, so that merges take more memory than one call for all tokens.
        max_tokens = PART_ROWS // self.q.shape[1] if len(chunks) > 1 else len(self.q)
        tiles = self._tiles(max([0, *map(self.lists.num_listed, chunks)]), max_tokens)
        if not chunks:
            return self._attend_tiles(tiles, torch.cat(self.new_rows), None, num_new)
        rows, width = self.rows, self.q.shape[-1]
        gather = ContextGather(self.exchange, chunks, lambda chunk: read_rows(rows, chunk.local_slots, width, dtype))
        parts: list[tuple[Tensor, Tensor]] = []
        for number, gathered in gather:
            if number == 0:
                parts = self._attend_tiles(tiles, torch.cat([*self.new_rows, gathered]), number, num_new)
            else:
                # Results are rounded once, after the last chunk.
                merged = dtype if number == len(chunks) - 1 else torch.promote_types(dtype, torch.float32)
                for part, tokens in enumerate(tiles):
                    parts[part] = merge_part(*parts[part], *self._attend(tokens, gathered, number, 0), merged)
            del gathered  # The next gather needs this memory: at most two chunks exist at a time.
        return parts

    def attend_in_place(self, selection: SelectedTokens) -> list[tuple[Tensor, Tensor]]:
        """Attend to windows, and as in decode to selected entries on the ranks that own them: return out and lse of
        each tile of tokens.
        """
        parts, q, keys = [], self.q, torch.cat(self.new_rows)
        for tokens in self._tiles(0, PART_ROWS // (q.shape[1] * self.dcp.decode_context_parallel_size)):
            chosen = selection.rows(tokens)
            # Copies start at multiples of 16 bytes, because Triton would compile another kernel for other addresses.
            call = self._call(tokens, self.rows, chosen.slots.clone(), chosen.num_slots.clone())
            of_entries = dcp_mla_decode(call._replace(q=self.exchange.gather_heads(call.q)), self.exchange)
            parts.append(merge_part(*self._attend(tokens, keys, None, len(keys)), *of_entries, q.dtype))
        return parts

    def _tiles(self, num_entries: int, max_tokens: int) -> list[slice]:
        """Return the tokens that attend at a time, at most max_tokens, each to at most num_entries."""
        num_rows, num_tokens = self.step.plan.config.sliding_window + num_entries, len(self.q)
        size = max(1, min(LISTED_ROWS // num_rows, max_tokens))
        if num_tokens <= size:  # A compiler makes a graph for each length of the loop.
            return [slice(0, num_tokens)]
        return [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]

    def _attend_tiles(
        self, tiles: Sequence[slice], keys: Tensor, number: int | None, num_before: int
    ) -> list[tuple[Tensor, Tensor]]:
        """Attend from each tile of tokens (`_attend`)."""
        return [self._attend(tokens, keys, number, num_before) for tokens in tiles]

    def _attend(self, tokens: slice, keys: Tensor, number: int | None, num_before: int) -> tuple[Tensor, Tensor]:
        """Attend to gathered rows [N, D]: to windows if num_before rows come before the chunk's, and to the entries of
        the chunk of a number if there is one.
        """
        return mla_decode(self._call(tokens, keys[:, None], *self.lists.list_rows(tokens, number, num_before)))

    def _call(self, tokens: slice, cache: Tensor, rows: Tensor, num: Tensor) -> DecodeCall:
        """Return the call of attention to the first num [n] of rows [n, N] of a cache."""
        assert self.step.context is not None
        call = DecodeCall(self.q[tokens], None, cache, rows, num, self.step.plan.config.softmax_scale, self.q.shape[-1])
        return call._replace(workspace=self.step.context.workspace, backend=self.dcp.attention_backend)
