"""VLLM_BATCH_INVARIANT with this package's attention: bits of answers, in vLLM's real engine."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.engines.conftest import save_model
from tests.engines.test_vllm_gpu import EAGER, GRAPHS, VARIABLES
from tests.engines.trees import VERSIONS, vllm_tree, vllm_variables
from tests.support.launchers import ROOT, Ended, run_together, torchrun

INVARIANT = {"VLLM_BATCH_INVARIANT": "1"}
ON_CPU = {"dtype": "float32", "compilation_config": {"custom_ops": ["none"]}, **EAGER}
ON_GPU = {
    "dtype": "bfloat16",
    "gpu_memory_utilization": 0.05,
    "kv_cache_memory_bytes": 1 << 27,  # vLLM measures the free memory otherwise, which other tests change meanwhile.
    "attention_backend": "CUSTOM",
}
WHOLE, PIECES = {"max_num_batched_tokens": 512}, {"max_num_batched_tokens": 37}
SHARDED = {"decode_context_parallel_size": 2, "cp_kv_cache_interleave_size": 64}


def run_engine(model: Path, variables: dict[str, str], num_ranks: int, check: bool = True, **options: Any) -> Ended:
    """Run `vllm_invariant.py`."""
    program = [ROOT / "tests" / "engines" / "vllm_invariant.py", model, json.dumps(options)]
    return run_together([(torchrun(program, num_ranks), variables | INVARIANT)], check=check, timeout=600)[0]


def on_cpu() -> dict[str, str]:
    """Return the environment of an engine on CPUs."""
    return vllm_variables(vllm_tree(VERSIONS[-1])) | {"DCPMLA_VLLM": "default"}


def check_bits(*ended: Ended) -> None:
    """Check that answers are equal over batches, cached blocks and engines, and would not be in another order."""
    first, *later = reports = [json.loads(each.stdout.splitlines()[-1]) for each in ended]
    for report in reports:
        assert report["alone"] == report["first turns"] + report["second turns"]
        assert max(report["cached"]) >= 128
        assert report["calls"]["in a fixed order"] == report["calls"]["dcp_mla_decode"] > 0
        assert "dcp_mla_prefill" not in report["calls"]
        assert report["another order"] != report["first turns"][-1:], "the order decides nothing"
    assert all(other["alone"] == first["alone"] for other in later)


def test_bits_do_not_depend_on_batch_chunks_cache_and_dcp_size(tmp_path: Path) -> None:
    """TP 2: DCP 1 with whole prompts, DCP 2 with chunks of 37 tokens; requests together, one by one, and over blocks of
    earlier turns, answers among them.
    """
    model = save_model(tmp_path / "model", num_heads=2, head_dim=32)
    check_bits(*(run_engine(model, on_cpu(), 2, **ON_CPU, **layout) for layout in (WHOLE, PIECES | SHARDED)))


def test_another_interleave_is_a_mistake(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", num_heads=2, head_dim=32)
    ended = run_engine(model, on_cpu(), 2, check=False, **ON_CPU, decode_context_parallel_size=2)
    assert ended.returncode
    assert (
        "ValueError: cp_kv_cache_interleave_size (--cp-kv-cache-interleave-size) is 1; with VLLM_BATCH_INVARIANT and "
        "-dcp 2 it must be 64" in ended.stderr
    )


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize(
    ("num_gpus", "pieces"),
    [
        pytest.param(1, PIECES, marks=pytest.mark.gpu),
        pytest.param(2, PIECES | SHARDED, marks=pytest.mark.gpu_2),
    ],
)
@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_bits_on_gpus(tmp_path: Path, num_gpus: int, pieces: dict[str, Any], cache: str) -> None:
    """Whole prompts eagerly; pieces of prompts, and decodes in graphs."""
    model = save_model(tmp_path / "model", num_heads=16, head_dim=128)
    layouts = ({**ON_GPU, "kv_cache_dtype": cache, **each} for each in (WHOLE | EAGER, pieces | GRAPHS))
    check_bits(*(run_engine(model, VARIABLES, num_gpus, **layout) for layout in layouts))
