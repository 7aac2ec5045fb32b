"""The rows of parts, copied between one rank's cache and contiguous memory (`RowMover`)."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from dcpmla.cache.items import Items
from dcpmla.cache.layers import Cache
from dcpmla.transfer.layout import CacheLayout
from dcpmla.transfer.route import Part, Piece
from dcpmla.upload import upload


class RowMover:
    """One rank's rows, for either end of a transfer.

    Args:
        cache: Cache of the rank.
        layout: Layout of the cache (`describe`).
    """

    def __init__(self, cache: Cache, layout: CacheLayout) -> None:
        self._tokens = [each.rows for rows in [cache.shared_rows, *cache.token_rows] for each in rows]
        self._states = [each.rows for each in cache.state_rows]
        self._layout = layout
        self._device = cache.tensors[0].device

    def gather(self, part: Part, blocks: Sequence[int], state: int | None, out: Tensor) -> None:
        """Copy the rows of a part into contiguous memory, on the current stream.

        Args:
            blocks: Blocks of the request, from position 0 on.
            state: State of the request; None for parts without rows of states.
            out: Memory [part.num_bytes] uint8 on the cache's device.
        """
        for memory, items, piece, place in self._places(part, blocks, state, out):
            if piece.row_bytes == memory.num_bytes:
                memory.read(items, place)
                continue
            rows = place.new_empty(len(place), memory.num_bytes)
            memory.read(items, rows)
            for columns, sent in piece.slices(is_target=False):
                place[:, sent] = rows[:, columns]

    def scatter(self, part: Part, blocks: Sequence[int], state: int | None, content: Tensor) -> None:
        """Copy contiguous memory into the rows of a part, on the current stream (arguments of `gather`)."""
        for memory, items, piece, place in self._places(part, blocks, state, content):
            if piece.row_bytes == memory.num_bytes:
                memory.write(items, place)
                continue
            rows = place.new_empty(len(place), memory.num_bytes)
            memory.read(items, rows)
            for columns, sent in piece.slices(is_target=True):
                rows[:, columns] = place[:, sent]
            memory.write(items, rows)

    def _places(
        self, part: Part, blocks: Sequence[int], state: int | None, content: Tensor
    ) -> Iterator[tuple[Items, Tensor, Piece, Tensor]]:
        """Yield for each piece its memory, its items [n] int64, and its rows in the content [n, row_bytes]."""
        # Layers share arrays of rows, and tensors of one shape have them at the same places.
        keys = [self._key(piece, part.is_state) for piece in part.pieces]
        first = dict(zip(keys, part.pieces, strict=True))
        numbers = [self._items(piece, part.is_state, blocks, state) for piece in first.values()]
        there = dict(zip(first, upload(numbers, self._device), strict=True))
        for key, piece in zip(keys, part.pieces, strict=True):
            memory = (self._states if part.is_state else self._tokens)[piece.tensor]
            end = piece.start + len(piece.rows) * piece.row_bytes
            yield memory, there[key], piece, content[piece.start : end].view(len(piece.rows), -1)

    def _key(self, piece: Piece, is_state: bool) -> tuple[int, ...]:
        """Return a key that pieces share only if their rows are at the same places in their tensors."""
        if is_state:
            return id(piece.rows), self._layout.states[piece.tensor].num_rows
        spec = self._layout.tokens[piece.tensor]
        return id(piece.rows), spec.per_block, spec.is_shared

    def _items(
        self, piece: Piece, is_state: bool, blocks: Sequence[int], state: int | None
    ) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the numbers of a piece's rows in their tensor."""
        layout = self._layout
        if is_state:
            assert state is not None
            num_rows = layout.states[piece.tensor].num_rows
            return state * num_rows + piece.rows % num_rows
        spec, index = layout.tokens[piece.tensor], piece.rows
        if not spec.is_shared:
            index = layout.owner(0).local_index(index)
        table = np.asarray(blocks, dtype=np.int64)
        return table[index // spec.per_block] * spec.per_block + index % spec.per_block
