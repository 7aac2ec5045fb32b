"""Which rows move between two layouts, against loops over positions."""

import json
from dataclasses import replace
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpmla.transfer.layout import CacheLayout, StateSpec, TokenSpec
from dcpmla.transfer.route import Part, Route, find_routes


def make_layout(tp: int, dcp: int, interleave: int, block_size: int, num_layers: int = 2) -> CacheLayout:
    """Return a layout with latents and keys of 4 positions in each layer, ids, and a state that is cut by heads; and
    with keys and values of two heads in the last layer.
    """
    rows = [TokenSpec("token ids", -1, 4, block_size * dcp, 1, True)]
    for layer in range(num_layers):
        rows.append(TokenSpec("latents", layer, 24, block_size, 1, False))
        rows.append(TokenSpec("index keys", layer, 12, block_size // 4, 4, False))
    num_shares = min(2, tp // dcp)
    rows.append(TokenSpec("keys and values", num_layers - 1, 16 // num_shares, block_size, 1, False, num_shares))
    states = StateSpec("memories", 96 // tp, 1, 1, 1), StateSpec("inputs", 3 * 48 // tp, 5, 3, 3)
    shared = StateSpec("sums", 20, 2, 1, 0)
    return CacheLayout(tp, dcp, interleave, tuple(rows), (*states, shared), (("model", "a"),))


@st.composite
def layouts(draw: st.DrawFn) -> CacheLayout:
    tp = draw(st.sampled_from([1, 2, 4, 8]))
    dcp = draw(st.sampled_from([size for size in (1, 2, 4, 8) if tp % size == 0]))
    interleave = draw(st.sampled_from([1, 2, 4, 16]))
    return make_layout(tp, dcp, interleave, 4 * interleave * draw(st.sampled_from([1, 3])))


def moved(parts: list[Part], tensor: int) -> list[int]:
    return [
        row
        for part in parts
        for piece in part.pieces
        if piece.tensor == tensor
        for row in piece.listed[piece.window].tolist()
    ]


def columns_of(layout: CacheLayout, rank: int) -> tuple[int, int]:
    """Return the first byte that a rank has of whole keys and values, and the end."""
    spec = layout.tokens[-1]
    share = rank // layout.dcp_size // (layout.tp_size // layout.dcp_size // spec.num_shares)
    return share * spec.row_bytes, (share + 1) * spec.row_bytes


def moved_columns(parts: list[Part], tensor: int, source: CacheLayout, rank: int) -> list[tuple[int, tuple[int, int]]]:
    """Return rows, and the bytes of whole rows that move."""
    first, _ = columns_of(source, rank)
    pieces = [piece for part in parts for piece in part.pieces if piece.tensor == tensor]
    return [
        (row, (first + at, first + at + length))
        for piece in pieces
        for at, _, length in piece.columns
        for row in piece.listed[piece.window].tolist()
    ]


def joined(columns: list[tuple[int, int]]) -> tuple[int, int]:
    """Return the bytes of parts that touch and do not overlap."""
    columns = sorted(columns)
    assert all(end == start for (_, end), (start, _) in pairwise(columns))
    return columns[0][0], columns[-1][1]


@given(
    source=layouts(),
    target=layouts(),
    cuts=st.lists(st.integers(1, 90), min_size=1, max_size=4),
    first=st.integers(0, 40),
    max_bytes=st.sampled_from([24, 100, 5000]),
)
def test_each_row_arrives_once(
    source: CacheLayout, target: CacheLayout, cuts: list[int], first: int, max_bytes: int
) -> None:
    """In ranges of positions, at each rank that owns it, from the nearest rank that has it."""
    borders, routes = np.cumsum([first, *cuts]).tolist(), find_routes(source, target)
    for target_rank in range(target.tp_size):
        arrived: dict[int, list[tuple[int, int]]] = {tensor: [] for tensor in range(len(source.tokens))}
        columns: dict[int, list[tuple[int, int]]] = {}  # of keys and values: first column in whole rows, and the end
        for source_rank in range(source.tp_size):
            route = Route(source, source_rank, target, target_rank)
            for start, end in pairwise(borders):
                parts = route.parts(start, end, max_bytes)
                assert bool(parts) <= ((source_rank, target_rank) in routes)
                assert all(part.num_bytes <= max_bytes for part in parts)
                for tensor in arrived:
                    arrived[tensor] += [(row, source_rank) for row in moved(parts, tensor)]
                for row, column in moved_columns(parts, len(source.tokens) - 1, source, source_rank):
                    columns.setdefault(row, []).append(column)
        expected_columns = columns_of(target, target_rank)
        rows = range(borders[0], borders[-1])
        own = [row for row in rows if row // target.interleave % target.dcp_size == target_rank % target.dcp_size]
        assert {row: joined(each) for row, each in columns.items()} == dict.fromkeys(own, expected_columns)
        for tensor, spec in enumerate(source.tokens[:-1]):
            expected = []
            for row in range(borders[0] // spec.span, borders[-1] // spec.span):
                if spec.is_shared:
                    expected.append((row, target_rank * source.tp_size // target.tp_size))
                elif row // target.interleave % target.dcp_size == target_rank % target.dcp_size:
                    replica = target_rank * (source.tp_size // source.dcp_size) // target.tp_size
                    owner = row // source.interleave % source.dcp_size
                    expected.append((row, replica * source.dcp_size + owner))
            assert sorted(arrived[tensor]) == expected


def test_parts_are_large_whatever_the_interleaves_are() -> None:
    """V3's 61 layers, 8,192 positions from 8 ranks with I = 1 to 8 with I = 64: nearly full slots of 16 MiB."""
    latents = tuple(TokenSpec("latents", layer, 1152, 64, 1, False) for layer in range(61))
    source, target = (CacheLayout(8, 8, interleave, latents, ()) for interleave in (1, 64))
    parts = Route(source, 3, target, 5).parts(8192, 16384, 1 << 24)
    num_bytes = 61 * 8192 // 64 * 1152
    assert [part.num_bytes for part in parts] == [num_bytes]
    assert len(Route(source, 3, target, 5).parts(0, 1 << 17, 1 << 24)) == -(-16 * num_bytes // (1 << 24))
    assert parts[0].last_layer == 60


def test_a_row_must_fit() -> None:
    layout = make_layout(1, 1, 1, 4)
    with pytest.raises(ValueError, match="a row of 24 bytes does not fit into slots of 23"):
        Route(layout, 0, layout, 0).parts(0, 4, 23)


def test_layouts_travel_as_json() -> None:
    layout = make_layout(4, 2, 2, 8)
    content = json.loads(msgspec.json.encode(layout))
    assert msgspec.convert(content, CacheLayout) == layout
    changes = (
        {"tokens": [[1]]},
        {"tp_size": "4"},
        {"dcp_size": 0},
        {"dcp_size": 3},
        {"interleave": True},
        {"facts": [1]},
    )
    for wrong in ({}, *({**content, **change} for change in changes)):
        with pytest.raises(ValueError, match=r"Expected|Object missing|layout is no layout of a cache"):
            msgspec.convert(wrong, CacheLayout)


def test_layouts_that_differ_are_refused_by_name() -> None:
    layout = make_layout(4, 2, 2, 8)
    layout.check_matches(make_layout(2, 1, 16, 64))
    with pytest.raises(ValueError, match="model is a on the prefill server and b on the decode server"):
        layout.check_matches(replace(layout, facts=(("model", "b"),)))
    with pytest.raises(ValueError, match="caches 2 layers .* 3; .* --speculative-method"):
        layout.check_matches(make_layout(4, 2, 2, 8, num_layers=3))
    wider = replace(layout, tokens=(layout.tokens[0], layout.tokens[1]._replace(row_bytes=32), *layout.tokens[2:]))
    with pytest.raises(ValueError, match="rows of latents differ: row_bytes is 24 on the prefill server and 32 on the"):
        layout.check_matches(wider)
    with pytest.raises(ValueError, match="different kinds of rows"):
        layout.check_matches(replace(layout, states=layout.states[:1]))
    with pytest.raises(ValueError, match="memories"):
        layout.check_matches(replace(layout, states=(layout.states[0]._replace(row_bytes=25), *layout.states[1:])))
