"""What an engine's decode graphs are made over, and what is said where they cannot be; capturing itself needs a GPU."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dcpmla.attention.build import StepBuilder
from dcpmla.cache.latent import LatentCache, LatentPlan
from dcpmla.config import DCPConfig
from dcpmla.integrations.decode_graphs import GraphMaker
from dcpmla.runtime.graph import CannotCapture, DecodeGraph
from dcpmla.runtime.graph_inputs import GraphSize
from tests.support.hash_model import BLOCK, MESH, HashModel

NUM_BLOCKS = 7


def make_cache() -> LatentCache:
    plan = LatentPlan(
        num_layers=1, num_blocks=NUM_BLOCKS, block_size=BLOCK, row_width=2, dtype=torch.float32, dcp_size=1
    )
    return LatentCache(plan, torch.device("cpu"))


def make_maker(max_model_len: int, mesh: Any = MESH) -> GraphMaker:
    model: Any = HashModel()
    return GraphMaker(model, model.decode, torch.tensor(0), DCPConfig(block_size=BLOCK), mesh, 3, max_model_len)


@pytest.mark.parametrize(("max_model_len", "num_columns"), [(3 * BLOCK - 1, 3), (1000 * BLOCK, NUM_BLOCKS)])
def test_a_block_table_no_wider_than_the_longest_request(
    max_model_len: int, num_columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DecodeGraph, "capture", lambda *_: None)
    graph = make_maker(max_model_len).capture(make_cache())
    assert graph is not None
    _, metadata = graph._padded.rows(GraphSize(3))
    assert metadata.decode is not None
    assert metadata.decode.block_table.shape == (3, num_columns)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_is_said_once(rank: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """By the first rank; and nobody tries again over the next cache."""
    tries = []

    def capture(graph: DecodeGraph, num_sizes: int | None) -> None:
        tries.append(graph)
        raise CannotCapture("it waits at model.py:3 (forward), on rank 1")

    monkeypatch.setattr(DecodeGraph, "capture", capture)
    maker = make_maker(20, SimpleNamespace(**{**vars(MESH), "tp_rank": rank}))
    assert [maker.capture(make_cache()) for _ in range(2)] == [None, None]
    assert len(tries) == 1
    words = "decode steps run without CUDA graphs: it waits at model.py:3 (forward), on rank 1"
    assert [record.getMessage() for record in caplog.records] == ([words] if rank == 0 else [])


def test_a_capture_that_fails_leaves_no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("device", "Stream", "graph_pool_handle", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: nullcontext())
    monkeypatch.setattr("dcpmla.runtime.graph.gather_values", lambda reason, *_: [reason])
    graph: Any = DecodeGraph(
        HashModel().decode, torch.tensor(0), make_cache(), StepBuilder(DCPConfig(block_size=4), 0), MESH, 3, 20
    )
    graph._device, graph._warm_up, graph._host_sync = torch.device("cuda"), lambda *_: None, lambda *_: ""
    for without_memory, sizes in ((2, [3, 2]), (0, [3, 2, 1])):
        tried: list[int] = []
        graph._capture = lambda _, size, *rest, full=without_memory, tried=tried: (
            tried.append(size.num_reqs) or "no memory" * (size.num_reqs == full)
        )
        with pytest.raises(CannotCapture, match="^no memory, on rank 0$") if without_memory else nullcontext():
            graph.capture()
        assert tried == sizes
        assert graph.is_captured == (not without_memory)
    graph._host_sync = lambda *_: "it waits"
    with pytest.raises(CannotCapture, match="^it waits, on rank 0$"):
        graph.capture()
    assert not graph.is_captured
