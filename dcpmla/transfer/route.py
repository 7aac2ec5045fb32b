"""The rows of a cache that move between the ranks of two jobs, by index arithmetic alone (`Route`, `PartList`).

Nothing here depends on a device or on other processes: both jobs compute the same lists of parts.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from dcpmla.transfer.layout import CacheLayout, StateSpec, TokenSpec

_ALIGNMENT = 16  # bytes; pieces of a part begin at multiples, so that their rows are copied as wide integers


class Piece(NamedTuple):
    """Rows of one tensor in a part.

    Attributes:
        tensor: Index of the tensor among the layout's tokens, or its states.
        listed: Numbers in the sequence of all rows of a list of parts [n] int64; of states, positions. Tensors whose
            rows have the same numbers share it.
        window: Those of them that the part has.
        start: First byte in the part.
        columns: Bytes of a row: first byte on the source rank, on the target rank, and length.
    """

    tensor: int
    listed: np.ndarray[Any, np.dtype[np.int64]]
    window: slice
    start: int
    columns: tuple[tuple[int, int, int], ...]

    @property
    def num_rows(self) -> int:
        """Return the number of rows."""
        return self.window.stop - self.window.start

    @property
    def row_bytes(self) -> int:
        """Return the bytes of a row that move."""
        return sum(length for *_, length in self.columns)

    def slices(self, is_target: bool) -> Iterator[tuple[slice, slice]]:
        """Yield slices of a row on a rank, each with its slice of the bytes that move."""
        end = 0
        for *firsts, length in self.columns:
            first, start, end = firsts[is_target], end, end + length
            yield slice(first, first + length), slice(start, end)


class Part(NamedTuple):
    """Rows that move together.

    Attributes:
        num_bytes: Bytes with gaps between pieces.
        is_state: Whether they are rows of states.
        last_layer: Last layer whose rows it has; -1 for none.
    """

    pieces: tuple[Piece, ...]
    num_bytes: int
    is_state: bool
    last_layer: int


class Route:
    """The rows that one TP rank of a job sends to one TP rank of another.

    A row that several ranks have comes from the nearest one: replica t n // T of n replicas for rank t of T. Rows whose
    columns are cut over DCP groups (`TokenRows.num_shares`) come from the groups that have some of the target's.

    Args:
        source, target: Layouts of the two jobs, which match.
    """

    def __init__(self, source: CacheLayout, source_rank: int, target: CacheLayout, target_rank: int) -> None:
        self._source, self._target = source, target
        self._ranks = source_rank, target_rank
        self._has_shared = source_rank == target_rank * source.tp_size // target.tp_size

    def parts(self, start: int, end: int, max_bytes: int) -> list[Part]:
        """Return the parts with rows of positions [start, end). A row belongs to the range of its last position.

        Raises:
            ValueError: A row is larger than max_bytes.
        """
        known: dict[tuple[int, bool], np.ndarray[Any, np.dtype[np.int64]]] = {}
        packer = _Packer(max_bytes, is_state=False)
        for tensor, (spec, there) in enumerate(zip(self._source.tokens, self._target.tokens, strict=True)):
            columns = self._token_columns(spec, there)
            if not columns:
                continue
            key = spec.span, spec.is_shared
            if key not in known:
                known[key] = self._rows(start // spec.span, end // spec.span, spec.is_shared)
            packer.add(tensor, known[key], columns, spec.layer)
        return packer.finish()

    def state_parts(self, num_tokens: int, max_bytes: int) -> list[Part]:
        """Return the parts with the state after num_tokens.

        Raises:
            ValueError: A row is larger than max_bytes.
        """
        packer = _Packer(max_bytes, is_state=True)
        for tensor, (here, there) in enumerate(zip(self._source.states, self._target.states, strict=True)):
            columns = self._columns(here, there)
            if columns:
                packer.add(tensor, np.arange(max(0, num_tokens - here.num_last), num_tokens), columns, -1)
        return packer.finish()

    @property
    def is_empty(self) -> bool:
        """Return whether nothing ever moves."""
        cut = any(self._columns(*specs) for specs in zip(self._source.states, self._target.states, strict=True))
        rows = zip(self._source.tokens, self._target.tokens, strict=True)
        has_rows = any(self._token_columns(*specs) for specs in rows if not specs[0].is_shared)
        return not (cut or self._has_shared or (has_rows and self._owners_meet))

    @property
    def _owners_meet(self) -> bool:
        source, target = self._source, self._target
        period = math.lcm(source.dcp_size * source.interleave, target.dcp_size * target.interleave)
        return len(self._rows(0, period, False)) > 0

    def _rows(self, start: int, end: int, is_shared: bool) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the numbers of rows in [start, end) that both ranks have."""
        rows = np.arange(start, end)
        for layout, rank in zip((self._source, self._target), self._ranks, strict=True):
            if not is_shared:
                owner = layout.owner(rank)
                rows = rows[owner.rank_of(rows) == owner.rank]
        return rows

    def _token_columns(self, here: TokenSpec, there: TokenSpec) -> tuple[tuple[int, int, int], ...]:
        """Return the bytes of a position's row that come from this source (`Piece.columns`)."""
        if here.is_shared:
            return ((0, 0, here.row_bytes),) if self._has_shared else ()
        source, (rank, target_rank) = self._source, self._ranks
        num_replicas = source.num_groups // here.num_shares
        if rank // source.dcp_size % num_replicas != target_rank * num_replicas // self._target.tp_size:
            return ()
        shares = [
            rank // layout.dcp_size * spec.num_shares // layout.num_groups
            for rank, layout, spec in zip(self._ranks, (source, self._target), (here, there), strict=True)
        ]
        return _common_columns((here.row_bytes, there.row_bytes), shares, 1)

    def _columns(self, here: StateSpec, there: StateSpec) -> tuple[tuple[int, int, int], ...]:
        """Return the bytes of a state's row that both ranks have (`Piece.columns`)."""
        if not here.num_parts:
            return ((0, 0, here.row_bytes),) if self._has_shared else ()
        widths = here.row_bytes // here.num_parts, there.row_bytes // there.num_parts
        return _common_columns(widths, self._ranks, here.num_parts)


def _common_columns(
    widths: tuple[int, int], numbers: Sequence[int], num_parts: int
) -> tuple[tuple[int, int, int], ...]:
    """Return the bytes that two cuts of a row have in common (`Piece.columns`).

    Args:
        widths, numbers: For the source and the target, the bytes of a cut, and which of the successive cuts it is.
        num_parts: Number of groups of columns, each cut by itself.
    """
    firsts = [width * number for width, number in zip(widths, numbers, strict=True)]
    first, end = max(firsts), min(first + width for first, width in zip(firsts, widths, strict=True))
    if first >= end:
        return ()
    return tuple(
        (part * widths[0] + first - firsts[0], part * widths[1] + first - firsts[1], end - first)
        for part in range(num_parts)
    )


def find_routes(source: CacheLayout, target: CacheLayout) -> dict[tuple[int, int], Route]:
    """Return the routes between the pairs of a prefill rank and a decode rank that talk about a handoff.

    A prefill rank whose rows other replicas send talks with one decode rank, to know when the handoff has ended.
    """
    pairs = product(range(source.tp_size), range(target.tp_size))
    routes = {pair: Route(source, pair[0], target, pair[1]) for pair in pairs}
    senders = {rank for (rank, _), route in routes.items() if not route.is_empty}
    return {
        (rank, there): route
        for (rank, there), route in routes.items()
        if not route.is_empty or (rank not in senders and there == rank % target.tp_size)
    }


@dataclass(eq=False)
class PartList:
    """The parts that one rank sends to another. Both ranks list them: range by range, and last the state's.

    Attributes:
        name: Name of the other rank's transport.
        route: Rows that move.
        position: Position up to which parts were listed.
        num_tokens: End of the positions that move.
        max_bytes: Most bytes of a part.
        is_complete: Whether the other rank knows that all parts were sent.
        range: Range of the parts in the list; an empty one means the state, and None that nothing was listed.
        index: Index of the next part in the list.
    """

    name: str
    route: Route
    position: int
    num_tokens: int
    max_bytes: int
    is_complete: bool = False
    parts: Sequence[Part] = ()
    index: int = 0
    range: tuple[int, int] | None = None

    @property
    def has_state(self) -> bool:
        """Return whether the list has the parts of the state."""
        return self.range is not None and self.range[0] == self.range[1]

    @property
    def is_at_end(self) -> bool:
        """Return whether no part of the list is left."""
        return self.index == len(self.parts)

    def start_range(self, start: int, end: int) -> None:
        """List the parts of a range, and the state's for an empty one."""
        self.parts = self._list(start, end)
        self.position, self.range, self.index = end, (start, end), 0

    def _list(self, start: int, end: int) -> Sequence[Part]:
        if start == end:
            return self.route.state_parts(end, self.max_bytes)
        return self.route.parts(start, end, self.max_bytes)


class _Packer:
    """The parts of successive rows, each as full as it may be."""

    def __init__(self, max_bytes: int, is_state: bool) -> None:
        self._max_bytes, self._is_state = max_bytes, is_state
        self._parts: list[Part] = []
        self._start_part()

    def _start_part(self) -> None:
        self._pieces: list[Piece] = []
        self._num_bytes, self._last_layer = 0, -1

    def add(
        self,
        tensor: int,
        rows: np.ndarray[Any, np.dtype[np.int64]],
        columns: tuple[tuple[int, int, int], ...],
        layer: int,
    ) -> None:
        """Add rows of a tensor."""
        row_bytes, first = sum(length for *_, length in columns), 0
        if len(rows) and row_bytes > self._max_bytes:
            raise ValueError(f"a row of {row_bytes:,} bytes does not fit into slots of {self._max_bytes:,}")
        while first < len(rows):
            num = min(len(rows) - first, (self._max_bytes - self._num_bytes) // row_bytes)
            if num:
                self._pieces.append(Piece(tensor, rows, slice(first, first + num), self._num_bytes, columns))
                end = self._num_bytes + num * row_bytes
                self._num_bytes = min(self._max_bytes, -(-end // _ALIGNMENT) * _ALIGNMENT)
                self._last_layer = layer
                first += num
            if first < len(rows):
                self._flush()

    def finish(self) -> list[Part]:
        """Return all parts."""
        self._flush()
        return self._parts

    def _flush(self) -> None:
        if self._pieces:
            part = Part(tuple(self._pieces), self._num_bytes, self._is_state, self._last_layer)
            self._parts.append(part)
        self._start_part()
