"""The gathered rows that each prefill token attends to (`RowLists`)."""

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from dcpmla.attention.layers.compressed.calls import ChunkEntries
from dcpmla.attention.layers.compressed.config import LayerKind
from dcpmla.attention.layers.compressed.step import CompressedMetadata
from dcpmla.attention.layers.compressed.visible import append_entries
from dcpmla.attention.select.step import SelectedTokens
from dcpmla.attention.step.chunks import ContextChunk

KEPT_ROWS = 1 << 21  # most row numbers that a step keeps for its next layers
_Tensors = tuple[Tensor, ...]


class RowLists:
    """Lists of rows for the prefill tokens of a step.

    Gathered rows belong to windows from earlier steps, to new tokens, then to a chunk's entries. All layers list the
    same rows, except for selected entries. So lists of all tokens at a time are kept in the step's context: small steps
    would spend more time on lists than on attention.

    Args:
        step: Step with prefills.
        kind: Kind of the layer.
        num_tokens: Number of prefill tokens, the step's last ones.
    Attributes:
        chunks: Entries that the layer gathers.
    """

    def __init__(self, step: CompressedMetadata, kind: LayerKind, num_tokens: int) -> None:
        assert step.context is not None
        self._step, self._context, self._num_tokens = step, step.context, num_tokens
        self._window = step.plan.config.sliding_window
        self._entries = kind.ratio, kind.selects
        self.chunks: Sequence[ContextChunk] = step.context.chunks.get(self._entries, ())

    def of_windows(self, tokens: slice) -> tuple[Tensor, Tensor]:
        """Return the rows [n, window] int32 of some tokens' windows, and their number [n] int32."""
        rows, num = self._kept("windows", tokens, self._window + 1, lambda: self._list_windows(tokens))
        return rows, num

    def of_chunk(
        self, tokens: slice, number: int, selection: SelectedTokens | None, num_before: int
    ) -> tuple[Tensor, Tensor]:
        """Return the rows [n, N] int32 of some tokens' windows and entries, and their number [n] int32.

        Args:
            number: Number of the chunk whose entries were gathered.
            selection: Selected entries of each token; None for all entries before the token.
            num_before: Number of rows before the chunk's; 0 if windows are left out.
        """
        if selection is not None:
            return self._append(tokens, number, selection.positions[tokens], num_before)
        num_listed = max(self.chunks[number].keys.lens)
        key = "entries", self._entries, number
        width = 1 + num_listed + (self._window if num_before else 0)

        def append() -> _Tensors:
            first, *_ = self._bounds(tokens, number, num_before)
            entries = first[:, None] + torch.arange(num_listed, dtype=torch.int32, device=first.device)
            return self._append(tokens, number, entries, num_before)

        rows, num = self._kept(key, tokens, width, append)
        return rows, num

    def _append(self, tokens: slice, number: int, entries: Tensor, num_before: int) -> tuple[Tensor, Tensor]:
        """Return the lists of windows with entries [n, N] appended."""
        rows, num = self.of_windows(tokens) if num_before else self._empty(tokens)
        return append_entries(rows, num, entries, ChunkEntries(*self._bounds(tokens, number, num_before)))

    def _empty(self, tokens: slice) -> tuple[Tensor, Tensor]:
        request = self._requests(tokens)
        return request.new_empty(len(request), 0), torch.zeros_like(request)

    def _bounds(self, tokens: slice, number: int, num_before: int) -> _Tensors:
        """Return the first of a chunk's entries that each token may attend to, the end, and the first one's row."""

        def find() -> _Tensors:
            chunk, visible = self.chunks[number], self._step.entries[self._entries[0]].visible
            assert visible is not None
            request = self._requests(tokens) - self._step.request[self._first]  # among the prefills
            first, base = chunk.first_position[request], chunk.keys.start_loc[request]
            end = first + chunk.keys.start_loc[request + 1] - base
            return first, torch.minimum(visible.seq_lens[self._first :][tokens], end), base + num_before

        return self._kept(("bounds", self._entries, number), tokens, 3, find)

    def _list_windows(self, tokens: slice) -> tuple[Tensor, Tensor]:
        context, request = self._context, self._requests(tokens)
        positions = self._step.positions[self._first :][tokens]
        num = (positions + 1).clamp(max=self._window).to(torch.int32)
        position = (positions + 1 - num)[:, None] + torch.arange(self._window, device=positions.device)
        first_row, first_position = context.first_row[tokens, None], context.first_position[tokens, None]
        is_new = position >= self._step.first_position[request][:, None]
        rows = torch.where(is_new, context.new_row[tokens, None] + position, first_row + position - first_position)
        return rows.to(torch.int32), num

    @property
    def _first(self) -> int:
        """Return the number of tokens before the prefills."""
        return len(self._step.positions) - self._num_tokens

    def _requests(self, tokens: slice) -> Tensor:
        return self._step.request[self._first :][tokens]

    def _kept(self, key: Hashable, tokens: slice, width: int, compute: Callable[[], _Tensors]) -> _Tensors:
        """Return what compute returns, or what an earlier layer kept. Lists of all tokens are kept while there is room.

        Args:
            width: Row numbers of each token, its number of rows among them.
        """
        kept, is_whole = self._context.kept, tokens.stop - tokens.start == self._num_tokens
        if is_whole and key in kept:
            return kept[key]
        tensors, num_kept = compute(), sum(part.numel() for parts in kept.values() for part in parts)
        if is_whole and num_kept + self._num_tokens * width <= KEPT_ROWS:
            kept[key] = tensors
        return tensors
