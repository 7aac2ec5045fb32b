"""Decode graphs where there is no GPU: static memory, padding, refusals; that captured steps would hold; the same
tokens from the engine.

Replays are in multigpu/test_graph_gpu.py: they equal bit for bit the padded steps that run here.
"""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dcpmla.attention.step.metadata import StepBuilder, StepMetadata
from dcpmla.attention.step.table import StepRequests
from dcpmla.cache.latent import LatentCache
from dcpmla.config import DCPConfig
from dcpmla.runtime.graph import StepGraph
from dcpmla.runtime.graph_inputs import GraphInputs
from dcpmla.runtime.graph_sizes import GraphLimits, GraphSize, decode_sizes
from dcpmla.runtime.sampling import SamplingParams
from tests.support.hash_model import BLOCK, MESH, HashModel, make_engine, new_cache

DCP = DCPConfig(block_size=BLOCK)
MAX_NUM_SEQS, MAX_MODEL_LEN = 6, 5 * BLOCK


def requests_of(seq_lens: list[int], query_lens: list[int] | None = None) -> StepRequests:
    tables = [list(range(5 * index, 5 * index + 5)) for index in range(len(seq_lens))]
    return StepRequests(query_lens or [1] * len(seq_lens), seq_lens, tables)


def step_of(requests: StepRequests, device: str = "cpu", **options: Any) -> StepMetadata:
    return StepBuilder(DCP, 0, device).build(requests, **options)


def sums(inputs: Tensor, metadata: StepMetadata, cache: LatentCache) -> Tensor:
    """Make a step that shows all its numbers; the first blocks of requests of one token each."""
    assert metadata.decode is not None
    numbers = [inputs, metadata.tokens.positions, metadata.tokens.slots, metadata.decode.local_seq_lens]
    has_one_each = metadata.decode.max_query_len == 1
    numbers.append(metadata.decode.block_table[:, 0] if has_one_each else torch.zeros(len(inputs)))
    return torch.stack([number.double() for number in numbers], -1)


def make_graph(step: Any = sums, cache: LatentCache | None = None, query_len: int = 1) -> StepGraph:
    cache, limits = cache or new_cache(40), (MAX_NUM_SEQS, MAX_MODEL_LEN, query_len)
    return StepGraph.decodes(step, torch.tensor(0), cache, StepBuilder(DCP, 0), MESH, *limits)


def test_sizes_are_those_of_vllm() -> None:
    for most, expected in (
        (1, (1,)),
        (3, (1, 2, 3)),
        (20, (1, 2, 4, 8, 16, 20)),
        (256, (1, 2, 4, *range(8, 257, 8))),
        (300, (1, 2, 4, *range(8, 257, 8), 272, 288, 300)),
    ):
        assert decode_sizes(most) == [GraphSize.of_requests(size) for size in expected]
        assert decode_sizes(most, 3) == [GraphSize(3 * size, True, 3) for size in expected]
    assert decode_sizes(0, 3) == []


@given(
    batches=st.lists(
        st.lists(st.tuples(st.integers(1, 3), st.integers(0, MAX_MODEL_LEN - 3)), min_size=1, max_size=MAX_NUM_SEQS),
        min_size=1,
        max_size=4,
    ),
    longest=st.sampled_from([1, 3]),
)
def test_padded_steps_have_the_rows_of_bare_ones(batches: list[list[tuple[int, int]]], longest: int) -> None:
    """Nothing of earlier steps is left. Requests of several tokens repeat their last one."""
    cache, padded, memory = new_cache(40), list[Tensor](), set()

    def step(*numbers: Any) -> Tensor:
        padded.append(sums(*numbers))
        return padded[-1]

    graph = make_graph(step, cache, longest)
    for number, batch in enumerate(batches):
        query_lens = [min(new, longest) for new, _ in batch]
        requests = requests_of([new + context for new, (_, context) in zip(query_lens, batch, strict=True)], query_lens)
        token_ids = torch.arange(sum(query_lens)) + 10 * number
        out = graph.run(token_ids, requests)
        assert torch.equal(out, sums(token_ids, step_of(requests, max_decode_query_len=max(query_lens)), cache))
        memory.add(out.data_ptr())
        query_len = longest if max(query_lens) > 1 else 1
        assert len(padded[-1]) == size_of(graph, len(batch), max(query_lens)).num_tokens
        of_requests, rest = padded[-1].tensor_split([len(batch) * query_len])
        for rows, num_tokens in zip(of_requests.unflatten(0, (-1, query_len)), query_lens, strict=True):
            last = rows[num_tokens - 1].clone()
            last[2] = -1  # written once
            assert torch.equal(rows[num_tokens:], last.expand(query_len - num_tokens, -1))
        assert rest[:, :4].tolist() == [[0, 0, -1, 0]] * len(rest)
    assert len(memory) == 1 or longest > 1


def size_of(graph: StepGraph, num_reqs: int, query_len: int = 1) -> GraphSize:
    size = graph.decode_size(num_reqs, query_len)
    assert size is not None
    return size


def inputs_of(input_like: Tensor, sizes: list[GraphSize]) -> GraphInputs:
    return GraphInputs(input_like, sizes, GraphLimits(4, 20), new_cache(40).sizes, StepBuilder(DCP, 0))


def test_hidden_rows_are_padded_with_zeros() -> None:
    """Static memory takes no history of gradients."""
    two, four = GraphSize.of_requests(2), GraphSize.of_requests(4)
    padded = inputs_of(torch.empty(3, dtype=torch.bfloat16), [two, four])
    padded.fill(four, torch.full((3, 3), torch.nan, dtype=torch.bfloat16), requests_of([1, 2, 3]))
    padded.fill(two, torch.ones(1, 3, dtype=torch.bfloat16, requires_grad=True) * 1, requests_of([7]))
    padded.lay_out(two)
    inputs, metadata = padded.step(two)
    assert inputs.tolist() == [[1, 1, 1], [0, 0, 0]]
    assert not inputs.requires_grad
    assert (metadata.num_tokens, metadata.num_decode_tokens) == (2, 2)
    assert metadata.tokens.slots.tolist() == [6, -1]
    assert metadata.decode is not None
    assert metadata.decode.block_table.shape == (2, 5)


REFUSED = {
    "two tokens": (
        requests_of([2, 2], [2, 2]),
        "2 requests of at most 2 tokens; the graph of decodes is for 1 to 6 requests of 1",
    ),
    "too many": (requests_of([1] * 7), r"has 7 requests .* for 1 to 6 requests of 1 \(max_num_seqs\)"),
    "none": (requests_of([]), "has 0 requests"),
    "too long": (
        StepRequests([1], [MAX_MODEL_LEN + 1], [[*range(6)]]),
        f"seq_lens has {MAX_MODEL_LEN + 1} tokens; .* at most {MAX_MODEL_LEN}, raise max_model_len",
    ),
    "no new tokens": (requests_of([3, 3], [1, 0]), "request 1: query_lens is 0"),
    "a table too short": (StepRequests([1], [BLOCK + 1], [[0]]), "request 0: block_tables has 1 blocks"),
    "a table too few": (StepRequests([1, 1], [1, 1], [[0]]), "have 2, 2 and 1 requests"),
    "a block too many": (StepRequests([1], [1], [[40]]), "has block 40; the cache has 40 blocks"),
    "a negative block": (StepRequests([1], [1], [[-1]]), "has block -1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_other_steps(name: str) -> None:
    requests, message = REFUSED[name]
    cache = new_cache(40)
    with pytest.raises(ValueError, match=message):
        make_graph(cache=cache).run(torch.zeros(sum(requests.query_lens), dtype=torch.int64), requests)


def test_refuses_other_memory() -> None:
    cache = new_cache(40)
    graph = make_graph(cache=cache)
    token_ids = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"inputs is torch.int32 on cpu; the graph takes torch.int64 on cpu"):
        graph.run(token_ids.int(), requests_of([1]))
    with pytest.raises(ValueError, match=r"inputs has shape \(2,\); expected \(1,\)"):
        graph.run(token_ids.new_zeros(2), requests_of([1]))
    with pytest.raises(ValueError, match="max_num_seqs is 0"):
        StepGraph.decodes(sums, token_ids[0], cache, StepBuilder(DCP, 0), MESH, 0, 1)
    with pytest.raises(ValueError, match="only steps on a GPU can be captured"):
        graph.capture()
    assert not graph.is_captured


def test_refuses_steps_that_return_other_rows() -> None:
    cache = new_cache(40)
    with pytest.raises(ValueError, match=r"step returned shape \(1, 5\); expected \(2, 5\), a row a token"):
        make_graph(lambda *numbers: sums(*numbers)[:1], cache).run(
            torch.zeros(2, dtype=torch.int64), requests_of([1, 1])
        )


def test_the_decode_workspace_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the engine for all its steps, and by the graph for its own."""
    made: list[Tensor] = []
    for module in ("attention.step.metadata", "runtime.runner", "runtime.graph_inputs"):
        monkeypatch.setattr(f"dcpmla.{module}.decode_workspace", lambda _: made.append(torch.zeros(1)) or made[-1])
    model, used = HashModel(), []
    hidden = model.hidden
    model.hidden = lambda tokens, metadata, cache: used.append(metadata.decode) or hidden(tokens, metadata, cache)  # type: ignore[method-assign]
    engine = make_engine(num_blocks=20, max_num_seqs=3, model=model, with_graph=True)
    engine.add([1, 2, 3], SamplingParams(max_new_tokens=6, ignore_eos=True))
    engine.step()
    engine.step()
    engine.graph = None
    list(engine.run())
    of_graph, of_engine = made
    assert [decode and id(decode.workspace) for decode in used] == [None, *[id(of_graph)] * 2, *[id(of_engine)] * 3]
    assert step_of(requests_of([1])).decode.workspace is made[2]  # type: ignore[union-attr]


def test_batches_beyond_the_largest_run_eagerly() -> None:
    """The engine says which graph runs."""
    lines = list[str]()
    engine = make_engine(num_blocks=20, max_num_seqs=3, with_graph=True, on_step=lines.append)
    engine.graph = StepGraph.decodes(
        HashModel().decode, torch.tensor(0), engine.cache, StepBuilder(engine.dcp, 0), MESH, 2, 200
    )
    requests = [engine.add([1, 2, 3], SamplingParams(max_new_tokens=num_new, ignore_eos=True)) for num_new in (3, 4, 4)]
    list(engine.run())
    assert lines == [
        "prefill step 0 (3 requests, 9 tokens)",
        "decode step 1 (3 requests, 3 tokens)",
        "decode step 2 (3 requests, 3 tokens)",
        "decode step 3 (2 requests, 2 tokens; graph of 2 requests)",
    ]
    assert requests[1].token_ids == requests[2].token_ids
