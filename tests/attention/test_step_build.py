"""The arguments of a step's layout: results, and refused values."""

import itertools
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcpmla import DCPConfig
from dcpmla.attention.backends.calls import Segments
from dcpmla.attention.layers.linear.step import DeltaMetadata, delta_metadata
from dcpmla.attention.select.step import with_selection
from dcpmla.attention.step.chunks import max_chunk_tokens
from dcpmla.attention.step.metadata import DecodeMetadata, StepBuilder
from dcpmla.attention.step.table import StepRequests, StepTraits
from dcpmla.cache.latent import LatentPlan, LayerMemory
from dcpmla.runtime.graph_inputs import GraphInputs
from dcpmla.runtime.graph_sizes import GraphLimits, GraphSize
from tests.support.layouts import dcp_config


@pytest.mark.parametrize("interleave", [1, 16, 64])
def test_one_rank_reads_a_chunk_in_token_order(interleave: int) -> None:
    dcp = dcp_config(1, 1, interleave, block_size=64, context_workspace_tokens=192)
    step = StepBuilder(dcp, 0).build(StepRequests([3, 9], [150, 75], [[3, 1, 2], [5, 4]]))
    assert len(step.prefill.context_chunks) > 1
    for chunk in step.prefill.context_chunks:
        assert torch.equal(chunk.order, torch.arange(len(chunk.local_slots)))
        assert torch.equal(chunk.tokens, chunk.order)


COUNTS = "query_lens, seq_lens and block_tables have {} requests; they must have the same number"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], [], []), COUNTS.format("0, 0 and 0") + ", at least"),
        (([1], [1, 2], [[0]]), COUNTS.format("1, 2 and 1")),
        (([1], [1], [[0], [1]]), COUNTS.format("1, 1 and 2")),
        (([1, 0], [1, 4], [[0], [1]]), "request 1: query_lens is 0 and seq_lens 4; 1 <= query_lens <= seq_lens must"),
        (([5], [4], [[0]]), "request 0: query_lens is 5 and seq_lens 4; 1 <= query_lens <= seq_lens must hold"),
        (([1, 1], [1, 9], [[0], [3, -1]]), "request 1: block_tables has block -1; ids start at 0"),
        (([2, 2], [8, 9], [[0], [1]]), "request 1: block_tables has 1 blocks, room for 8 tokens; seq_lens is 9"),
        (([2], [2], [[]]), "request 0: block_tables has 0 blocks, room for 0 tokens; seq_lens is 2"),
    ],
)
def test_mistakes_are_named(arguments: tuple[Any, Any, Any], message: str) -> None:
    dcp = dcp_config(2, 2, 4, block_size=4, context_workspace_tokens=20)
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        StepBuilder(dcp, 0).build(StepRequests(*arguments))
    with pytest.raises(ValueError, match=r"dcp_rank is 2; .* must be in \[0, 2\)"):
        StepBuilder(dcp, 2)
    for num_decodes in (-1, 3):
        with pytest.raises(ValueError, match=rf"^num_decodes is {num_decodes}; it must be in \[0, 2\]"):
            StepBuilder(dcp, 0).build(StepRequests([3, 3], [4, 4], [[0], [1]]), num_decodes=num_decodes)


@pytest.mark.parametrize(
    ("max_model_len", "max_num_seqs", "layout", "expected"),
    [
        (1000, 4, (1, 1, 64), 8000),  # eight sequences' worth
        (100, 8, (1, 1, 64), 2048),  # four blocks a request
        (163840, 4, (1, 1, 64), 65536),  # the cap
        (163840, 2000, (1, 1, 64), 128000),  # the cap gives way: a block for every request
        (163840, 256, (8, 64, 64), 131072),  # the example of docs/plugging_in.md
        (100, 8, (8, 1, 64), 2048),  # lcm(64, 8) = 64
        (100, 8, (6, 16, 64), 4 * 8 * 192),  # lcm(64, 96) = 192
        (1, 400, (5, 16, 64), 128000),  # lcm(64, 80) = 320
    ],
)
def test_workspace_size(max_model_len: int, max_num_seqs: int, layout: tuple[int, int, int], expected: int) -> None:
    size, interleave, block_size = layout
    dcp = dcp_config(size, size, interleave, block_size=block_size)
    assert max_chunk_tokens(max_model_len, max_num_seqs, dcp.chunk_alignment) == expected


@given(
    query_lens=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    width=st.integers(1, 8),
    max_tokens=st.integers(1, 40),
)
def test_parts_of_decodes_are_whole_requests(query_lens: list[int], width: int, max_tokens: int) -> None:
    """The parts are steps of their own, one after the other, as large as they may be."""
    lens, tables = [length + 5 for length in query_lens], [[index, 10 + index] for index in range(len(query_lens))]
    dcp, count = DCPConfig(block_size=32), len(query_lens)
    decode = StepBuilder(dcp, 0).build(StepRequests(query_lens, lens, tables), width, count).decode
    parts = list(decode.parts(max_tokens))
    assert [some.start for some, _ in parts] == [0, *(some.stop for some, _ in parts[:-1])]
    assert parts[-1][0].stop == sum(query_lens)
    rows = []
    for some, each in parts:
        num_tokens = some.stop - some.start
        assert num_tokens <= max(max_tokens, width)
        assert each.local_seq_lens.tolist() == decode.local_seq_lens[some].tolist()
        columns = each.block_table, each.local_seq_lens, each.request_index, each.query_start_loc
        assert all(column is None or column.data_ptr() % 16 == 0 for column in columns)  # kernels are compiled for this
        index = range(len(each.block_table)) if each.request_index is None else each.request_index.tolist()
        starts = range(0, num_tokens + 1, each.max_query_len) if each.queries is None else each.queries.start
        if each.query_start_loc is not None:
            assert each.query_start_loc.tolist() == list(starts)
        assert (starts[0], starts[-1], len(starts)) == (0, num_tokens, len(index) + 1)
        for request, (first, last) in zip(index, itertools.pairwise(starts), strict=True):
            assert 1 <= last - first <= width
            rows += [each.block_table[request, 0].item()] * (last - first)
    assert rows == [index for index, length in enumerate(query_lens) for _ in range(length)]


def test_parts_need_the_starts_of_all_segments() -> None:
    """Only the device knows the segments of a captured step."""
    start_loc = torch.tensor([0, 3, 6, 8, 8], dtype=torch.int32)
    table, lens = torch.zeros(4, 1, dtype=torch.int32), torch.ones(8, dtype=torch.int32)
    decode = DecodeMetadata(table, lens, Segments((0, 8), start_loc), 3, None)
    assert list(decode.parts(8)) == [(slice(0, 8), decode)]
    with pytest.raises(ValueError, match="max_tokens is 7; a CUDA graph's step of 8 tokens must be one part"):
        list(decode.parts(7))


@pytest.mark.parametrize("rejected", [(0, 0), (2, 1)])
def test_a_token_of_requests_with_states(rejected: tuple[int, int]) -> None:
    """In a padded step, the second request has two tokens of three, the last is padding. Rejected drafts move them."""
    steps = StepBuilder(DCPConfig(block_size=16), 0, "cpu", StepTraits(num_states=8))
    plan = LatentPlan(num_blocks=9, dcp_size=1, dtype=torch.float32, block_size=16, layers=(LayerMemory(1),))
    size = GraphSize.of_requests(3, 3)
    inputs = GraphInputs(torch.tensor(0), [size], GraphLimits(3, 16), plan, steps)
    inputs.clear(size)
    requests = StepRequests([3, 2], [8, 11], [[5], [2]], [4, 7])
    inputs.fill(size, torch.arange(5), requests, torch.tensor(rejected))
    inputs.lay_out(size)
    _, step = inputs.step(size)
    of_all, pieces = step.derive(DeltaMetadata, delta_metadata)
    assert pieces is None
    begin = [5 - rejected[0], 9 - rejected[1]]
    assert [column.tolist() for column in of_all] == [
        [0, 3, 6],
        [*begin, 0],
        [begin[0] + 3, begin[1] + 2, 0],
        [4, 7, -1],
    ]
    expected = [([5, 9], [6, 10]), ([6, 10], [7, 11]), ([7, 11], [8, 11])]
    for index, (first, end) in enumerate(expected):
        token = delta_metadata(step.nth_token(index)).recurrent
        assert token.start.tolist() == [0, 1, 2]
        found = token.first_position[:2] + torch.tensor(rejected), token.end[:2] + torch.tensor(rejected)
        assert [column.tolist() for column in found] == [first, end]
        assert token.first_position[2] == token.end[2]
        assert token.state.tolist() == [4, 7, -1]


def test_numbers_are_derived_once() -> None:
    """All passes over a step share them, whatever their layers share besides; a step of one token has its own."""
    step = StepBuilder(DCPConfig(block_size=16), 0).build(StepRequests([2], [30], [[0, 1]]), 2)
    made = [each.derive(list, lambda of: [of.num_tokens]) for each in (step, with_selection(step, 8), step)]
    assert made[0] is made[1] is made[2]
    token = step.nth_token(1)
    assert token.derive(list, lambda of: [of.num_tokens]) == [1]
    assert token.num_tokens == token.num_decode_tokens == token.num_decodes == token.decode.max_query_len == 1
    columns = *token.tokens, token.decode.local_seq_lens
    assert {column.stride() for column in columns} == {(1,)}  # what kernels ask for
