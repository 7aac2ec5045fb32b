"""What an engine's decode graphs are made over, and what is said where they cannot be; capturing itself needs a GPU."""

import gc
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch

from dcpmla.attention.step.metadata import StepBuilder
from dcpmla.cache.latent import LatentCache, LatentPlan, LayerMemory
from dcpmla.cache.layers import Cache
from dcpmla.config import DCPConfig
from dcpmla.integrations import decode_graphs
from dcpmla.integrations.decode_graphs import GraphMaker
from dcpmla.runtime.capture import CannotCapture, Track
from dcpmla.runtime.graph import StepGraph
from dcpmla.runtime.graph_inputs import GraphSize
from tests.support.hash_model import BLOCK, MESH, HashModel

NUM_BLOCKS = 7


def make_cache() -> LatentCache:
    plan = LatentPlan(
        num_blocks=NUM_BLOCKS, block_size=BLOCK, layers=(LayerMemory(2),), dtype=torch.float32, dcp_size=1
    )
    return LatentCache(plan, torch.device("cpu"))


def make_maker(max_model_len: int, mesh: Any = MESH) -> GraphMaker:
    model: Any = HashModel()
    model.placement = SimpleNamespace(dcp=DCPConfig(block_size=BLOCK), mesh=mesh)

    def new(cache: Cache, steps: StepBuilder, longest: int) -> StepGraph:
        return StepGraph.decodes(model.decode, torch.tensor(0), cache, steps, mesh, 3, longest)

    return GraphMaker("decode steps", new, model, max_model_len, 3, 0)


@pytest.mark.parametrize(("max_model_len", "num_columns"), [(3 * BLOCK - 1, 3), (1000 * BLOCK, NUM_BLOCKS)])
def test_a_block_table_no_wider_than_the_longest_request(
    max_model_len: int, num_columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepGraph, "capture", lambda *_: None)
    graph = make_maker(max_model_len).capture(make_cache())
    assert graph is not None
    _, metadata = graph._inputs.step(GraphSize.of_requests(3))
    assert metadata.decode is not None
    assert metadata.decode.block_table.shape == (3, num_columns)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_is_said_once(rank: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """By the first rank; and no rank tries again over the next cache."""
    tries = []

    def capture(graph: StepGraph, *_: Any) -> None:
        tries.append(graph)
        raise CannotCapture("it waits at model.py:3 (forward), on rank 1")

    monkeypatch.setattr(StepGraph, "capture", capture)
    maker = make_maker(20, SimpleNamespace(**{**vars(MESH), "tp_rank": rank}))
    assert [maker.capture(make_cache()) for _ in range(2)] == [None, None]
    assert len(tries) == 1
    words = "decode steps run without CUDA graphs: it waits at model.py:3 (forward), on rank 1"
    assert [record.getMessage() for record in caplog.records] == ([words] if rank == 0 else [])


@pytest.mark.parametrize("rank", [0, 1])
def test_captures_are_announced(rank: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """All ranks announce each capture before it begins, but none that measures. Without a terminal no bar appears."""
    lines, captured = list[str](), list[int]()

    def capture(graph: StepGraph, num_sizes: int | None = None, track: Track = iter) -> None:
        for _ in track(graph.sizes[::-1][:num_sizes]):
            captured.append(len(lines))

    monkeypatch.setattr(StepGraph, "capture", capture)
    maker = make_maker(20, SimpleNamespace(**{**vars(MESH), "tp_rank": rank}))
    maker.capture(make_cache(), lines.append)
    assert lines == [f"capturing decode steps: {number} requests" for number in (3, 2, 1)]
    assert captured == [1, 2, 3]
    maker._capture(make_cache(), 20, 2)
    assert captured[3:] == [3, 3]
    assert capfd.readouterr().err == ""


def test_measured_graphs_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is read with graphs of two sizes, with one of the largest size, and with none, before any garbage is
    collected by chance.
    """
    alive: WeakKeyDictionary[StepGraph, int] = WeakKeyDictionary()

    def capture(graph: StepGraph, num_sizes: int, _: Track) -> None:
        gc.collect()  # as `GraphSet.capture` does
        alive[graph] = num_sizes

    monkeypatch.setattr(StepGraph, "capture", capture)
    monkeypatch.setattr(decode_graphs, "_free_bytes", lambda _: 1000 - sum(90 + 10 * each for each in alive.values()))
    maker = make_maker(20)
    kind = SimpleNamespace(step_builder=HashModel.attention.step_builder, plan_cache=lambda *_: make_cache().sizes)
    monkeypatch.setattr(HashModel, "attention", kind)
    gc.collect()
    gc.disable()
    try:
        assert maker.measure() == 100 + 2 * 10  # three sizes
    finally:
        gc.enable()
