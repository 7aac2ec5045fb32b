"""Captures that fail, on one rank or on all, and what parts between graphs are given."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dcpmla import init_mesh
from dcpmla.parallel.quantized import NormedRows, QuantizedRows
from dcpmla.runtime.capture import CannotCapture, GraphSet, borrow
from tests.support.hash_model import MESH
from tests.support.ranks import run_ranks

SIZES = [3, 2, 1]


def new_set(compute: Any = lambda size, cut: None, mesh: Any = MESH) -> Any:
    return GraphSet(compute, "graph", mesh, torch.device("cuda"))


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("device", "stream", "Stream", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: nullcontext())
    nothing = SimpleNamespace(capture_begin=lambda **_: None, capture_end=lambda: None, replay=lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: nothing)
    monkeypatch.setattr("dcpmla.runtime.capture.gather_values", lambda reason, *_: [reason])
    monkeypatch.setattr(GraphSet, "_warm_up", lambda *_: None)
    monkeypatch.setattr(GraphSet, "_host_sync", lambda *_: "")


def test_parts_run_between_graphs_with_their_own_argument(fake_cuda: None) -> None:
    calls: list[Any] = []

    def compute(size: int, cut: Any) -> None:
        for layer in range(size):
            cut(lambda *arguments: calls.append(arguments), (layer, size))

    def track(sizes: Any) -> Any:
        for size in sizes:
            tracked.append((size, len(graphs._parts)))
            yield size

    graphs, tracked = new_set(compute), list[Any]()
    graphs.capture(SIZES, track)
    assert tracked == [(3, 0), (2, 1), (1, 2)]
    assert [len(graphs._parts[size]) for size in SIZES] == [7, 5, 3]
    assert not calls
    graphs.run(2, "step")
    assert calls == [(0, 2, "step"), (1, 2, "step")]
    graphs.release()
    graphs.run(1, "eager")
    assert calls[2:] == [(0, 1, "eager")]


def test_a_capture_that_runs_out_of_memory_leaves_no_graphs(fake_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "CUDA out of memory. Tried to allocate 9 GiB. GPU 0 has a total capacity of\nMuch more"
    tried = []

    def compute(size: int, cut: Any) -> None:
        tried.append(size)
        if size == 2:
            raise torch.OutOfMemoryError(words)

    graphs = new_set(compute)
    with pytest.raises(CannotCapture, match=r"^CUDA out of memory. Tried to allocate 9 GiB at test_capture.py:\d+ "):
        graphs.capture(SIZES)
    assert tried == [3, 2]
    assert not graphs.is_captured
    monkeypatch.setattr(GraphSet, "_host_sync", lambda *_: "it waits")
    with pytest.raises(CannotCapture, match="^it waits, on rank 0$"):
        graphs.capture(SIZES)
    assert not graphs.is_captured


def test_any_other_error_stops(fake_cuda: None) -> None:
    def compute(size: int, cut: Any) -> None:
        raise RuntimeError("not permitted")

    with pytest.raises(
        RuntimeError, match=r"graph of 3 broke off \(--enforce-eager .*: not permitted at test_capture.py:\d+ \(compute"
    ):
        new_set(compute).capture(SIZES)


def reasons() -> list[str]:
    """Reasons of the last rank alone, then of all but the first, then of none."""
    graphs, rank, found = new_set(mesh=init_mesh(3, 1)), dist.get_rank(), []
    for first in (2, 1):
        with pytest.raises(CannotCapture) as failure:
            graphs._agree(f"no memory for {rank}" if rank >= first else "")
        found.append(str(failure.value))
    graphs._agree("")
    return found


def test_all_ranks_give_the_first_reason() -> None:
    assert run_ranks(3, reasons) == [["no memory for 2, on rank 2", "no memory for 1, on rank 1"]] * 3


def test_borrowed_values_have_the_same_elements() -> None:
    rows = NormedRows(torch.arange(6.0).view(2, 3), QuantizedRows(torch.ones(2, 3), torch.zeros(2, 1)))
    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        source = NormedRows(rows.plain.to(device), QuantizedRows(*(part.to(device) for part in rows.quantized)))
        column = source.plain[:, 1:].to(torch.bfloat16)[:, 1]
        other, part, number, text = borrow((source, column, 3, "x"))
        assert isinstance(other, NormedRows)
        assert (number, text) == (3, "x")
        assert torch.equal(other.plain, source.plain)
        assert torch.equal(other.quantized.scales, source.quantized.scales)
        assert torch.equal(part, column)
        assert part.stride() == column.stride()
        assert part.data_ptr() == column.data_ptr()
