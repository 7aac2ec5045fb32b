"""Sparse MLA in vLLM with this package's selection and attention: its real engine on CPUs, its own model of GPUs."""

from pathlib import Path
from typing import Any

import pytest

from tests.engines.forked import report_of
from tests.engines.sparse_model import save_sparse_model, save_sparse_model_with_module


@pytest.fixture(scope="module")
def sparse_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sparse_model(tmp_path_factory.mktemp("sparse"))


def run_engine(model: Path, num_ranks: int, **options: Any) -> dict[str, Any]:
    """Run `vllm_sparse.py` and return its report."""
    options = {"block_size": 16, "threshold": 32, "longest": 150} | options
    report, _ = report_of("vllm_sparse.py", num_ranks, model, options, DCPMLA_VLLM="default")
    return report


def check(report: dict[str, Any]) -> None:
    """Check answers and selections of prompts of 1 to 150 tokens in chunks; again with prefixes and an aborted one."""
    assert report["error"] < 1e-4
    assert report["again"]["error"] < 1e-4
    assert report["again"]["ended"] == 5
    assert max(report["again"]["cached"]) >= 128
    selections = report["selections"]
    assert selections["num_rows"] > 500
    assert selections["num_equal"] > 0.98 * selections["num_rows"]
    assert selections["worst"] < 0.02
    assert selections["num_wrong"] == 0
    assert report["other models"] == ["TritonMLABackend", "DCPMLASparseBackend"]
    assert report["calls"]["select"] > 30
    assert report["calls"]["dcp_mla_decode"] > 30
    assert report["warm-up"]["select"] >= 6
    assert report["warm-up"]["exchanges of builders"] == 0


def check_sharded_drafts(report: dict[str, Any]) -> None:
    """Check a module's drafts over two ranks, whose prefills attend with absorbed queries. Without the merge, or with
    the candidates of one rank, answers are wrong.
    """
    assert report["drafts"]["made"] > 20
    assert report["drafts"]["right"] > 0.9 * report["drafts"]["made"]  # Ties may go either way.
    calls = report["calls"]
    assert "dcp_mla_prefill" not in calls
    assert calls["gather_candidates"] == calls["select"]
    assert calls["combine"] == calls["dcp_mla_decode"]
    assert report["own candidates"] < 0.9, "a choice among one rank's candidates would not be seen"
    assert report["without merge"] > 0.1


def test_one_rank(sparse_model: Path) -> None:
    """Long prefills attend to up-projected keys under a mask."""
    report = run_engine(sparse_model, 1, route="mha")
    check(report)
    assert report["calls"]["dcp_mla_prefill"] >= 4


def test_drafts_under_decode_context_parallelism(tmp_path: Path) -> None:
    """TP 2 x DCP 2 in groups of 4 tokens, two drafts a step by an MTP module."""
    model = save_sparse_model_with_module(tmp_path / "model")
    layout = {"decode_context_parallel_size": 2, "cp_kv_cache_interleave_size": 4}
    drafts = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
    report = run_engine(model, 2, route="absorbed", **layout, **drafts)
    check(report)
    check_sharded_drafts(report)
