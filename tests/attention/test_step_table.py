"""The tables of a step: its tokens against tokens that are dealt to ranks one by one, and the kernel against the
function that specifies it.

The kernel runs on a GPU, in Triton's interpreter without one, and is compiled for Hopper.
"""

import itertools

import pytest
import torch
from hypothesis import given

from dcpmla import DCPConfig
from dcpmla.attention.step import kernels
from dcpmla.attention.step.metadata import StepBuilder, lay_out
from dcpmla.attention.step.table import StepRequests, StepTable, StepTokens, StepTraits
from dcpmla.cache.latent import LatentPlan, LayerMemory
from dcpmla.runtime.graph_inputs import GraphInputs
from dcpmla.runtime.graph_sizes import GraphLimits, GraphSize
from tests.support.hopper import ptx_for_hopper
from tests.support.kernels import on_both, run_kernels
from tests.support.layouts import dcp_config
from tests.support.step_tables import TableCase, table_cases


@given(case=table_cases())
def test_tokens_of_padded_tables(case: TableCase) -> None:
    table, tokens = case.fill(), StepTokens.empty(case.sizes.num_tokens, "cpu")
    lay_out(table, tokens, case.layout)
    for column, wanted in zip(tokens, case.expected(), strict=True):
        assert column.tolist() == wanted
    padding = case.sizes.num_reqs - len(case.bounds)
    assert list(zip(table.begin.tolist(), table.end.tolist(), strict=True)) == case.bounds + [(0, 0)] * padding
    states = case.requests.states or [None]
    assert table.states.tolist() == [*([0] * len(case.bounds) if states[0] is None else states), *[-1] * padding]


@given(case=table_cases())
def test_segments_cover_the_room(case: TableCase) -> None:
    """Segments are parts of one request each, in order; the rows of padding after decodes are cut, too."""
    table, segment_len = case.fill(), case.requests.segment_len
    decodes = [request for request, new in enumerate(case.decodes) for _ in range(new)]
    if not case.sizes.num_segments:
        assert len(table.segment_request) == 0
        return
    starts, index = table.segment_start.tolist(), table.segment_request.tolist()
    assert starts[0] == 0
    assert starts[-1] == (case.sizes.room or len(decodes))
    rows: list[int] = []
    is_last = False
    for request, (begin, end) in zip(index, itertools.pairwise(starts), strict=True):
        assert 0 <= end - begin <= segment_len
        assert not is_last or begin == end  # empty segments come last
        is_last = begin == end
        assert request == 0 or not is_last
        assert not begin < len(decodes) < end  # none of decodes and padding
        rows += [request] * (end - begin)
    assert rows == decodes + [0] * (len(rows) - len(decodes))
    num_parts = sum(-(-length // segment_len) for length in (*case.decodes, len(rows) - len(decodes)))
    assert sum(end > begin for begin, end in itertools.pairwise(starts)) == num_parts  # as few as there can be


@given(case=table_cases())
def test_prefills_follow_decodes(case: TableCase) -> None:
    table, num_decodes = case.fill(), case.requests.num_decodes
    query_lens, seq_lens = case.requests.query_lens, case.requests.seq_lens
    new = query_lens[num_decodes:]
    starts, first = table.prefill_start.tolist(), table.prefill_position.tolist()
    if new:
        wanted = [0, *itertools.accumulate(new)]
        assert starts == wanted + wanted[-1:] * (len(starts) - len(wanted))
    assert first[: len(new)] == [end - num for num, end in zip(new, seq_lens[num_decodes:], strict=True)]
    num_attending = int(table.num_attending)
    assert num_attending == (
        case.num_absorbed if case.sizes.room and not case.sizes.query_len else case.sizes.num_tokens
    )
    if new and case.sizes.room:  # a graph finds the rows of prefills among all tokens by both numbers
        assert num_attending + starts[-1] == sum(query_lens)


def check_kernel(device: str) -> None:
    """Compare all columns, and the bounds of requests, with those of the function that specifies the kernel."""

    @given(case=table_cases())
    def check(case: TableCase) -> None:
        expected, layout = StepTokens.empty(case.sizes.num_tokens, "cpu"), case.layout
        table, tokens = case.fill(), StepTokens.empty(case.sizes.num_tokens, device)
        there = StepTable(*(column.to(device, copy=True) for column in table))
        wide = torch.nn.functional.pad(there.block_table, (0, 5), value=-9)  # the stride is not the width
        there = there._replace(block_table=wide[:, : there.block_table.shape[1]])
        lay_out(table, expected, layout)
        kernels.lay_out(there, tokens, layout.owner, layout.block_tokens // layout.owner.size, layout.traits.has_slots)
        for column, wanted in zip((*tokens, *there), (*expected, *table), strict=True):
            assert torch.equal(column.cpu(), wanted)

    check()


@on_both
def test_the_kernel(device: str) -> None:
    run_kernels(device, check_kernel)


@pytest.mark.parametrize("has_slots", [False, True])
def test_the_kernel_compiles_for_hopper(has_slots: bool) -> None:
    constants = {"BLOCK_SIZE": 64, "DCP_SIZE": 2, "INTERLEAVE": 1, "HAS_SLOTS": has_slots, "ROWS": 128}
    ptx_for_hopper(kernels.layout_kernel, "i32", constants, positions_ptr="*i64", slots_ptr="*i64")


@pytest.mark.parametrize("num_decodes", [0, 2, 4])
def test_the_step_of_a_replay_is_the_one_that_is_built(num_decodes: int) -> None:
    """The front of a padded table has the numbers of a step without padding."""
    dcp = dcp_config(2, 2, 2, block_size=4, context_workspace_tokens=16)
    steps = StepBuilder(dcp, 1, "cpu", StepTraits(num_states=9))
    lens, ends = [1, 3, 7, 5, 2][: num_decodes + 2], [9, 30, 7, 44, 21][: num_decodes + 2]
    tables = [[6 * index + block for block in range(6)] for index in range(len(lens))]
    requests = StepRequests(lens, ends, tables, list(range(len(lens)))[::-1], num_decodes, segment_len=2)
    plan = LatentPlan(num_blocks=40, dcp_size=2, dtype=torch.float32, block_size=4, layers=(LayerMemory(1),))
    size = GraphSize(64, is_whole=False)
    inputs = GraphInputs(torch.tensor(0), [size], GraphLimits(8, 64, 4), plan, steps)
    inputs.clear(size)
    inputs.fill(size, torch.arange(sum(lens)), requests)
    inputs.lay_out(size)
    step, built = inputs.replay(size, requests, None), steps.build(requests, 2, num_decodes)
    numbers = "num_tokens", "num_decode_tokens", "num_decodes", "max_seq_len", "requests"
    assert [getattr(step, name) for name in numbers] == [getattr(built, name) for name in numbers]
    for column, wanted in zip(step.tokens, built.tokens, strict=True):
        assert torch.equal(column, wanted)
    for name in ("begin", "end", "num_tokens", "states", "row_start", "block_table"):
        assert torch.equal(getattr(step.table, name), getattr(built.table, name))
    assert (step.decode is None) == (built.decode is None) == (num_decodes == 0)
    if step.decode is not None and built.decode is not None:
        assert step.decode.max_query_len == built.decode.max_query_len
        for name in ("block_table", "local_seq_lens", "request_index", "query_start_loc"):
            assert getattr(step.decode, name).tolist() == getattr(built.decode, name).tolist()
    assert step.prefill.queries.start == built.prefill.queries.start
    assert step.prefill.queries.start_loc.tolist() == built.prefill.queries.start_loc.tolist()
    assert step.prefill.first_position.tolist() == built.prefill.first_position.tolist()
    for chunk, wanted_chunk in zip(step.prefill.context_chunks, built.prefill.context_chunks, strict=True):
        for name in ("local_slots", "order", "tokens", "first_position"):
            assert torch.equal(getattr(chunk, name), getattr(wanted_chunk, name))


def test_a_step_larger_than_its_tables_is_refused() -> None:
    steps = StepBuilder(DCPConfig(block_size=16), 0)
    plan = LatentPlan(num_blocks=9, dcp_size=1, dtype=torch.float32, block_size=16, layers=(LayerMemory(1),))
    sizes = GraphSize(8), GraphSize(16)
    inputs = GraphInputs(torch.tensor(0), sizes, GraphLimits(1, 16), plan, steps)
    message = "query_lens has 2 requests with 2 tokens; the graph of 8 tokens, whole is for at most 1 requests"
    with pytest.raises(ValueError, match=message):
        inputs.fill(sizes[0], torch.arange(2), StepRequests([1, 1], [1, 1], [[0], [1]]))
    with pytest.raises(ValueError, match="query_lens has 1 requests with 9 tokens; the graph of 8 tokens, whole is"):
        inputs.fill(sizes[0], torch.arange(9), StepRequests([9], [9], [[0]]))
