"""DeepSeek-V4 in vLLM with this package's attention on GPUs, where vLLM is installed: eagerly and in full graphs of
decode, compared with transformers.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.engines.test_vllm_gpu import VARIABLES
from tests.engines.vllm_v4_drafts import save_v4_with_module
from tests.engines.vllm_v4_model import save_v4
from tests.support.launchers import ROOT, run_together, torchrun

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(find_spec("cutlass") is None, reason="nvidia-cutlass-dsl is not installed"),  # vLLM imports it
]
OURS = {
    "attention_backend": "CUSTOM",
    "gpu_memory_utilization": 0.05,
    "kv_cache_memory_bytes": 1 << 27,
    "disable_custom_all_reduce": True,
}
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 20]}
IN_GRAPHS = {"enforce_eager": False, "compilation_config": GRAPHS | {"custom_ops": ["none"]}}
# Products of float32 are in TF32. In bfloat16 the same model on CPUs is off by 0.73: near ties of experts tip.
TOLERANCES = {"float32": 0.02, "bfloat16": 1.5}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a model whose indexers select all entries: rounded keys would tip a choice."""
    return save_v4(tmp_path_factory.mktemp("v4"), index_topk=128)


def run_engine(model: Path, num_ranks: int, **options: Any) -> tuple[dict[str, Any], str]:
    """Run an engine of that many ranks; return its report and its log."""
    program = [ROOT / "tests" / "engines" / "vllm_v4_cases.py", model, json.dumps(OURS | options)]
    (ended,) = run_together([(torchrun(program, num_ranks), VARIABLES)], timeout=300)
    return json.loads(next(line for line in ended.stdout.splitlines() if line.startswith('{"blocks"'))), ended.stderr


def check(model: Path, num_ranks: int, dtype: str, **layout: Any) -> str:
    """Check the logprobs of an engine of that many ranks, and return its log."""
    report, log = run_engine(model, num_ranks, dtype=dtype, **layout)
    for turn, num_ended in (("first", 20), ("aborted", 19), ("tight", 4)):
        assert report[turn]["ended"] == num_ended, turn
        assert report[turn]["error"] < TOLERANCES[dtype], (turn, report[turn])
    for turn in ("one by one", "together", "after a reset"):
        assert report["reuse"][turn]["error"] < TOLERANCES[dtype], (turn, report["reuse"])
    return log


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_one_gpu(model: Path, dtype: str) -> None:
    check(model, 1, dtype)
    check(model, 1, dtype, **IN_GRAPHS)


@pytest.mark.gpu
def test_caches_in_8_bits(model: Path) -> None:
    check(model, 1, "bfloat16", kv_cache_dtype="fp8", **IN_GRAPHS)


@pytest.mark.gpu_2
def test_two_gpus(model: Path) -> None:
    for graphs in ({}, IN_GRAPHS):
        assert "dcpmla: exchange direct" in check(model, 2, "bfloat16", decode_context_parallel_size=2, **graphs)


@pytest.mark.gpu
def test_drafts_in_graphs(tmp_path: Path) -> None:
    """A module in plain torch makes most of the same drafts; answers are right, whatever is accepted."""
    drafts = {"method": "mtp", "num_speculative_tokens": 2}
    model = save_v4_with_module(tmp_path)
    report, _ = run_engine(model, 1, dtype="float32", speculative_config=drafts, **IN_GRAPHS)
    assert report["drafts"]["right"] > 0.9 * report["drafts"]["made"] > 90
    for turn in (report["first"], report["guided"], report["reuse"]["one by one"], report["reuse"]["together"]):
        assert turn["error"] < TOLERANCES["float32"], report
