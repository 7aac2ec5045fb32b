"""Sparse MLA in vLLM with this package's selection and attention on GPUs, where vLLM is installed: eagerly against
transformers over the same selections, and in full graphs of decode against the eager engine.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.engines.sparse_model import save_sparse_model
from tests.engines.test_vllm_gpu import (
    EAGER,
    GRAPHS,
    OURS,
    TOLERANCE,
    VARIABLES,
    largest_difference,
    logprobs_of,
)
from tests.support.launchers import ROOT, run_together, torchrun

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(find_spec("cutlass") is None, reason="nvidia-cutlass-dsl is not installed"),  # vLLM imports it
]
MEMORY = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 27, "disable_custom_all_reduce": True}


@pytest.fixture(scope="module")
def sparse_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sparse_model(tmp_path_factory.mktemp("sparse"), num_heads=16, head_dim=128)


def check_eagerly(model: Path, num_ranks: int, tolerance: float, **options: Any) -> None:
    """Check answers and selections as the tests on CPUs do; scores are of a model in bfloat16."""
    options |= OURS | MEMORY | {"dtype": "bfloat16", "threshold": 32, "route": "mha", "block_size": 64, "longest": 150}
    program = [ROOT / "tests" / "engines" / "vllm_sparse.py", model, json.dumps(options)]
    (ended,) = run_together([(torchrun(program, num_ranks), VARIABLES)], timeout=300)
    report = json.loads(next(line for line in ended.stdout.splitlines() if line.startswith('{"warm-up"')))
    assert report["error"] < tolerance
    assert report["again"]["error"] < tolerance
    selections = report["selections"]
    assert selections["num_wrong"] == 0
    assert selections["worst"] < 0.1
    assert report["calls"]["select"] > 30


def check_graphs(model: Path, **options: Any) -> list[str]:
    """Check that graphs of decode give what the eager engine gives; return what both logged."""
    (eager, graphs), logs = logprobs_of(model, *(each | OURS | options for each in (EAGER, GRAPHS)))
    assert largest_difference(graphs, eager) < TOLERANCE
    return logs


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("cache", "tolerance"), [("auto", TOLERANCE), ("fp8", 4 * TOLERANCE), ("fp8_ds_mla", 2 * TOLERANCE)]
)
def test_one_gpu(sparse_model: Path, cache: str, tolerance: float) -> None:
    check_eagerly(sparse_model, 1, tolerance, kv_cache_dtype=cache)
    check_graphs(sparse_model, kv_cache_dtype=cache)


@pytest.mark.gpu_2
@pytest.mark.parametrize("interleave", [1, 64])
def test_two_gpus(sparse_model: Path, interleave: int) -> None:
    layout = {"decode_context_parallel_size": 2, "cp_kv_cache_interleave_size": interleave}
    check_eagerly(sparse_model, 2, TOLERANCE, **layout)
    logs = check_graphs(sparse_model, **layout, tensor_parallel_size=2, block_size=64)
    assert all("dcpmla: exchange direct" in log for log in logs)
