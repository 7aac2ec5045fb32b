"""Steps with pieces of prompts, padded as graphs take them, against the same steps without graphs."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcpmla.attention.costs import RouteCosts
from dcpmla.attention.step.metadata import DecodeMetadata, StepBuilder, part_tokens
from dcpmla.attention.step.table import StepRequests
from dcpmla.config import DCPConfig
from dcpmla.runtime.graph import StepGraph
from dcpmla.runtime.graph_inputs import GraphInputs
from dcpmla.runtime.graph_sizes import GraphLimits, GraphSize, most_absorbed, token_sizes
from dcpmla.runtime.sampling import SamplingParams
from tests.support.costs import DrawnCosts
from tests.support.dense_layer import CONFIG
from tests.support.engine_loads import Load, loads, serve
from tests.support.hash_model import BLOCK, EOS, MESH, HashDrafter, HashModel, make_engine
from tests.support.layouts import dcp_config


@given(load=loads(), seed=st.integers(0, 100), num_drafts=st.sampled_from([0, 2]))
def test_answers_are_those_without_graphs(load: Load, seed: int, num_drafts: int) -> None:
    drafter = HashDrafter(num_drafts, 0.5, always=True) if num_drafts else None
    engine = make_engine(*load.limits, 60, mixed=True, costs=DrawnCosts(seed), drafter=drafter)
    serve(engine, load)
    assert engine.allocator.num_free == load.num_blocks


def test_both_kinds_of_graphs_are_used() -> None:
    lines: list[str] = []
    for seed in range(6):
        engine = make_engine(60, 16, 4, 60, mixed=True, costs=DrawnCosts(seed), on_step=lines.append)
        for length in (3, 9, 14, 20):
            engine.add(list(range(length)), SamplingParams(max_new_tokens=4, ignore_eos=True))
        list(engine.run())
    assert {", whole" in line for line in lines if "graph of" in line} == {True, False}


@pytest.mark.parametrize("most", [1, 16, 63, 64, 100, 512, 2000, 8192, 30000])
def test_sizes(most: int) -> None:
    narrow, sizes = token_sizes(most, 1, DCPConfig()), token_sizes(most, 8, DCPConfig())
    absorbed, others = sizes[True], sizes[False]
    assert (narrow[True][-1], token_sizes(most, 0, DCPConfig())[True]) == (min(most, 512), [])
    assert absorbed == sorted(set(absorbed))
    assert others == sorted(set(others))
    assert (absorbed[-1], others[-1]) == (min(most, 1024), min(most, 8192))
    assert len(absorbed) + len(others) <= 40
    for size, larger in zip(others, others[1:], strict=False):
        assert larger < 128 or larger - size <= larger / 2


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("heads", [16, 40, 64, 128])
def test_steps_of_graphs_fit_into_one_part(heads: int, deterministic: bool) -> None:
    """Each rank's largest steps are one part with all segments. A DCP group has `heads` heads."""
    for size in (1, 2, 4, 8):
        dcp = dcp_config(8, size, 64, block_size=64, deterministic=deterministic)
        width = RouteCosts(replace(CONFIG, num_heads=heads * 8 // size), dcp).tokens_per_request
        limit, largest = part_tokens(heads, dcp), most_absorbed(width, dcp)
        most = 256 if deterministic else limit
        assert largest == min(most, limit) or (heads == 40 and largest < limit)
        largest = min(1024, largest)
        assert token_sizes(8192, width, dcp)[True][-1] == (1024 if deterministic else largest)
        steps, lens = StepBuilder(dcp, size - 1), [3, 1, largest - 14, 10]
        absorbed, mixed = GraphSize(largest), GraphSize(8192, False)
        limits = GraphLimits(4, 2000, width, largest, min(256, largest))
        plan: Any = SimpleNamespace(num_blocks=80)
        inputs = GraphInputs(torch.tensor(0), [absorbed, mixed], limits, plan, steps)
        tables = [list(range(20 * index, 20 * index + 20)) for index in range(4)]
        requests = StepRequests(lens, [length + 50 for length in lens], tables)
        inputs.fill(absorbed, torch.zeros(largest, dtype=torch.int64), requests._replace(num_decodes=4))
        inputs.lay_out(absorbed)
        expected = steps.build(requests, width, num_decodes=4).decode
        assert expected is not None
        assert segments(inputs.step(absorbed)[1].decode, limit) == segments(expected, limit)
        for graph_size, num_tokens in ((absorbed, largest), (mixed, min(256, largest))):
            decode = inputs.step(graph_size)[1].decode
            assert decode is not None
            ((tokens, part),) = decode.parts(limit)
            assert (tokens, len(part.local_seq_lens)) == (slice(0, num_tokens), num_tokens)


def segments(decode: DecodeMetadata | None, limit: int) -> list[tuple[int, int, list[int]]]:
    """Return the first token, the first block and the lengths of each segment that has tokens, part after part."""
    assert decode is not None
    columns = []
    for tokens, part in decode.parts(limit):
        starts: Sequence[int] = range(0, tokens.stop - tokens.start + 1, part.max_query_len)
        if part.query_start_loc is not None:
            starts = part.query_start_loc.tolist()
        table = part.block_table if part.request_index is None else part.block_table[part.request_index]
        for (first, end), blocks in zip(itertools.pairwise(starts), table, strict=False):
            if end > first:
                lens = part.local_seq_lens[first:end].tolist()
                columns.append((tokens.start + first, int(blocks[0]), lens))
    return columns


def new_graph(max_num_tokens: int, max_num_seqs: int = 4, max_model_len: int = 40) -> StepGraph:
    engine = make_engine(20)
    steps = StepBuilder(engine.dcp, 0)
    return StepGraph.prompts(HashModel(), engine.cache, steps, MESH, max_num_tokens, max_num_seqs, max_model_len, 2)


def test_steps_that_are_too_large_have_no_size() -> None:
    """Limits of nothing, and blocks that the cache lacks, are named."""
    graph = new_graph(100)
    assert graph.prompt_size([30, 3], [5, 0], 2) == GraphSize(64)
    assert graph.prompt_size([30, 3], [5, 0], 1) == GraphSize(64, False)
    assert graph.prompt_size([97, 1, 1, 1], [0] * 4, 0) == GraphSize(100, False)
    assert graph.prompt_size([101], [0], 0) is None
    assert graph.prompt_size([2] * 5, [0] * 5, 5) is None
    requests = StepRequests([17], [17], [[0, 1, 2, 3, 4]])
    with pytest.raises(ValueError, match="query_lens has 1 requests with 17 tokens; the graph of 16 tokens, whole"):
        graph.run(torch.zeros(17, dtype=torch.int64), requests, GraphSize(16))
    for name, limits in (("max_num_tokens", (0, 4)), ("max_num_seqs", (8, 0)), ("max_model_len", (8, 4, 0))):
        with pytest.raises(ValueError, match=f"{name} is 0"):
            new_graph(*limits)
    requests = StepRequests([3], [3], [[20]])
    for size, num_decodes in ((GraphSize(16), 1), (GraphSize(64, False), 0)):
        with pytest.raises(ValueError, match="block_tables has block 20; the cache has 20 blocks"):
            graph.run(torch.zeros(3, dtype=torch.int64), requests._replace(num_decodes=num_decodes), size)


def test_steps_of_one_graph_with_prompts() -> None:
    """In a fixed order: prompts without contexts, up to a number, after up to 256 tokens of absorbed pieces."""
    steps = StepBuilder(DCPConfig(block_size=BLOCK, deterministic=True), 0)
    graph = StepGraph.prompts(HashModel(), make_engine(20).cache, steps, MESH, 2048, 600, 40, 8)
    for lens, contexts, num_absorbed, expected in (
        ([300], [0], 0, GraphSize(320)),
        ([300], [1], 0, GraphSize(384, False)),
        ([1, 1, 300], [9, 9, 0], 2, GraphSize(320)),
        ([10] * 8, [0] * 8, 0, GraphSize(96)),
        ([10] * 9, [0] * 9, 0, GraphSize(128, False)),
        ([10] * 20, [0] * 20, 0, GraphSize(256, False)),
        ([20] * 20, [0] * 20, 0, GraphSize(448)),
        ([1] * 256 + [30], [9] * 256 + [0], 256, GraphSize(320)),
        ([1] * 257 + [30], [9] * 257 + [0], 257, GraphSize(384, False)),
        ([1024], [0], 0, GraphSize(1024)),
        ([1025], [0], 0, GraphSize(1280, False)),
    ):
        assert graph.prompt_size(lens, contexts, num_absorbed) == expected, (lens, contexts)


@given(
    lens=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=5),
    width=st.integers(1, 4),
    padding=st.integers(0, 9),
    rank=st.integers(0, 1),
)
def test_columns_are_those_of_a_step(lens: list[tuple[int, int]], width: int, padding: int, rank: int) -> None:
    dcp = DCPConfig(tensor_parallel_size=2, decode_context_parallel_size=2, block_size=BLOCK)
    steps, query_lens = StepBuilder(dcp, rank), [new for new, _ in lens]
    seq_lens = [new + context for new, context in lens]
    tables = [list(range(8 * index, 8 * index + 8)) for index in range(len(lens))]
    requests, num_tokens = StepRequests(query_lens, seq_lens, tables), sum(query_lens)
    size = GraphSize(num_tokens + padding)
    limits = GraphLimits(5, 40, width, size.num_tokens)
    plan: Any = SimpleNamespace(num_blocks=80)
    inputs = GraphInputs(torch.tensor(0), [size], limits, plan, steps)
    inputs.fill(size, torch.zeros(num_tokens, dtype=torch.int64), requests._replace(num_decodes=len(lens)))
    inputs.lay_out(size)
    _, padded = inputs.step(size)
    step = steps.build(requests, width, num_decodes=len(lens))
    assert step.decode is not None
    assert padded.decode is not None
    assert padded.tokens.positions.tolist() == step.tokens.positions.tolist() + [0] * padding
    assert padded.tokens.slots.tolist() == step.tokens.slots.tolist() + [-1] * padding
    assert padded.decode.local_seq_lens.tolist() == step.decode.local_seq_lens.tolist() + [0] * padding
    assert padded.tokens.seq_lens.tolist() == (step.tokens.positions + 1).tolist() + [0] * padding
    starts, index = padded.table.segment_start.tolist(), padded.table.segment_request.tolist()
    assert starts == sorted(starts)
    assert (starts[0], starts[-1]) == (0, size.num_tokens)
    assert max(end - start for start, end in zip(starts, starts[1:], strict=False)) <= width
    for start, request in zip(starts, index, strict=False):
        if start < num_tokens:
            assert request == padded.tokens.request[start]


def test_prompts_of_one_graph_start_after_its_decodes() -> None:
    steps = StepBuilder(DCPConfig(block_size=BLOCK, deterministic=True), 0)
    size, plan = GraphSize(16), cast(Any, SimpleNamespace(num_blocks=80))
    inputs = GraphInputs(torch.tensor(0), [size], GraphLimits(4, 40, 1, 16, has_prompts=True), plan, steps)
    requests = StepRequests([1, 1, 9, 2], [5, 7, 9, 2], [[0, 1], [2, 3], [4, 5, 6], [7]], num_decodes=2)
    inputs.fill(size, torch.zeros(13, dtype=torch.int64), requests)
    inputs.lay_out(size)
    prefill = inputs.step(size)[1].prefill
    assert prefill is not None
    assert prefill.queries.start_loc.tolist() == [2, 11, 13, 13, 13]


def test_more_decodes_than_graphs_have_room_for_attend_between_them() -> None:
    model, engine = HashModel(), make_engine(200)
    steps = StepBuilder(engine.dcp, 0)
    graph = StepGraph.prompts(model, engine.cache, steps, MESH, 300, 2, 400, 1)
    tables = [list(range(100)), list(range(100, 110))]
    requests = StepRequests([290, 9], [290, 9], tables, num_decodes=1)
    token_ids = torch.arange(299) % EOS
    size = graph.prompt_size([290, 9], [0, 0], 1)
    assert size == GraphSize(300, False)
    out = graph.run(token_ids, requests, size).clone()
    expected = model.hidden(token_ids, steps.build(requests, 1, num_decodes=1), engine.cache)
    assert torch.equal(out, expected)
