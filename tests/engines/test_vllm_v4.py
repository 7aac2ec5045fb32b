"""DeepSeek-V4 in vLLM with this package's attention: vLLM's real engine on CPUs, against transformers."""

from pathlib import Path
from typing import Any

import pytest

from dcpmla.integrations.vllm import FIRST_WITH_V4
from tests.engines.forked import report_of
from tests.engines.trees import VERSIONS, vllm_tree
from tests.engines.vllm_names import Name, has, moved, uncalled
from tests.engines.vllm_v4_drafts import save_v4_with_module
from tests.engines.vllm_v4_model import save_v4
from tests.support.launchers import ROOT

PLUG_IN = ROOT / "dcpmla" / "integrations" / "vllm" / "compressed"
# Methods of vLLM's that the plug-in replaces, by the modules that call them.
CALLED = {
    "vllm.v1.core.sched.scheduler": (
        "get_computed_blocks",
        "_mamba_block_aligned_split",
        "_update_after_schedule",
        "reset_prefix_cache",
    ),
    "vllm.v1.worker.gpu.model_runner": ("add_requests", "set_attn"),
    "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator": ("_update_draft_decode_metadata",),
}
WITH_V4 = [version for version in VERSIONS if tuple(map(int, version.split(".")[:2])) >= FIRST_WITH_V4]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_v4(tmp_path_factory.mktemp("v4"))


def run_engine(model: Path, num_ranks: int, variables: dict[str, str], **engine: Any) -> tuple[dict[str, Any], str]:
    """Run `vllm_v4_cases.py`: return its report and its stderr."""
    return report_of("vllm_v4_cases.py", num_ranks, model, engine, **variables)


def check(report: dict[str, Any], num_layers: int = 4, tolerance: float = 1e-4) -> None:
    """Check logprobs, the code that has run, reuse, and that the cache is a part of vLLM's allocation."""
    for turn, ended in (("first", 20), ("aborted", 19), ("tight", 4), ("dummies", 4), ("static", 4)):
        assert report[turn]["ended"] == ended, turn
        assert report[turn]["error"] < tolerance, turn
    calls = report["calls"]
    assert calls["attend"] > 40 * num_layers
    assert calls["dcp_mla_decode"] > 20 * num_layers
    assert calls["attend_prefill"] > 5 * num_layers
    assert report["static"]["steps"] >= 5
    assert report["layers"] == num_layers, "vLLM has caches of its own for windows, states or index keys"
    assert report["joined weights"] == 3, "a layer of windows alone has one projection"
    assert report["in one piece"]
    assert report["bytes"] >= report["needed"]
    assert report["bytes"] <= report["pages"] + report["fixed"]
    assert report["left for pages"] == -report["fixed"], "vLLM's plan counts windows and sums"
    assert report["calls"]["dummy batches"] >= 8
    check_reuse(report, tolerance)


def check_reuse(report: dict[str, Any], tolerance: float = 1e-4, remembers_answers: bool = True) -> None:
    """Check the tokens that requests have reused, and their logprobs."""
    block, reuse = report["tokens"] // report["blocks"], report["reuse"]
    # The first of two prompts that part from others in an earlier block finds a state if a piece has ended there.
    is_short, is_cut, has_room = block == 256, report["cuts prompts"], report["blocks"] > 5
    earlier = [256 * (is_short and is_cut), 256 * is_short]
    assert reuse["one by one"]["cached"] == [0, 512, 512, *earlier, 0, block * remembers_answers]
    assert reuse["together"]["cached"] == [512, 512, block] or not has_room
    assert reuse["after a reset"]["cached"] == [0]
    for turn, ended in (("one by one", 7), ("together", 3), ("after a reset", 1)):
        assert reuse[turn]["ended"] == ended, turn
        assert reuse[turn]["error"] < tolerance, turn
    assert reuse["without copies"]["error"] > 0.05, "states decide nothing: the test would not see that one is wrong"


def test_preempted_requests(model: Path) -> None:
    """TP 1, chosen by --attention-backend CUSTOM, with four blocks for the requests: some lose theirs and restart. vLLM
    schedules steps before it knows the tokens of the last one, as on GPUs.
    """
    report, stderr = run_engine(
        model,
        1,
        {},
        attention_backend="CUSTOM",
        num_gpu_blocks_override=5,
        max_num_seqs=4,
        max_num_batched_tokens=1100,
        async_scheduling=True,
    )
    check(report)
    assert report["calls"]["_preempt_request"] >= 1
    assert report["async"]
    assert "dcpmla: prefix caching is off" not in stderr


def test_decode_context_parallel_matches_transformers(model: Path) -> None:
    """TP 2 x DCP 2: prompts of 1 to 300 tokens, 20 at once, in chunks of at most 100 tokens; a block holds twice the
    tokens in as many bytes.
    """
    report, stderr = run_engine(
        model,
        2,
        {"DCPMLA_VLLM": "default"},
        decode_context_parallel_size=2,
        cp_kv_cache_interleave_size=2,
        num_gpu_blocks_override=9,
    )
    check(report)
    assert report["tokens"] == 9 * 2 * 256
    assert report["calls"]["gather_heads"] > 100
    assert report["calls"]["combine"] == report["calls"]["gather_heads"]
    assert report["without merge"]["error"] > 0.1, "the merge decides nothing: the test would not see that it is wrong"
    assert "dcpmla: exchange a2a" in stderr


@pytest.fixture(scope="module")
def model_with_module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_v4_with_module(tmp_path_factory.mktemp("v4_mtp"))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_drafts(model_with_module: Path, num_ranks: int) -> None:
    """A module in plain torch makes the same drafts; answers are transformers', with drafts rejected and accepted. On
    two ranks vLLM schedules the next step before it knows how many drafts are rejected.
    """
    options: dict[str, Any] = {"decode_context_parallel_size": num_ranks, "async_scheduling": num_ranks == 2}
    drafts = {"method": "mtp", "num_speculative_tokens": 4 - num_ranks}
    options |= {"attention_backend": "CUSTOM", "num_gpu_blocks_override": 9, "speculative_config": drafts}
    report, _ = run_engine(model_with_module, num_ranks, {}, **options)
    for turn in ("first", "guided"):
        assert report[turn]["ended"] == 8
        assert report[turn]["error"] < 1e-4
    assert report["static"]["ended"] == 6
    assert report["static"]["error"] < 1e-4
    assert report["static"]["steps"] >= 4
    assert report["drafts"]["right"] == report["drafts"]["made"] > 100
    assert report["guided"]["calls"] < 0.8 * report["first"]["calls"], "more drafts are accepted"
    assert report["layers"] == 5
    assert report["bytes"] <= report["pages"] + report["fixed"]
    assert report["async"] == (num_ranks == 2)
    check_reuse(report, remembers_answers=False)


def test_caches_in_8_bits(tmp_path: Path) -> None:
    """Rows and index keys as vLLM caches them by default: transformers' logprobs over rounded rows. Indexers select all
    entries, since rounded keys would tip a choice.
    """
    model = save_v4(tmp_path / "model", index_topk=128)
    options = {"attention_backend": "CUSTOM", "num_gpu_blocks_override": 9, "kv_cache_dtype": "fp8"}
    report, _ = run_engine(model, 1, {}, **options)
    check(report, tolerance=0.1)  # a few codes are others; over exact rows the error is 1


@pytest.mark.parametrize("version", WITH_V4)
def test_every_name_is_there(version: str) -> None:
    """Every name that the attention of DeepSeek-V4 imports or replaces, in vLLM's own files."""
    tree = vllm_tree(version)
    models = (("nvidia", "_select_dsv4_attn_cls"), ("cpu", "DeepseekV4CPUAttention"))
    lines = moved(tree, PLUG_IN)
    for module, called in CALLED.items():
        lines += uncalled(tree, module, called)
    for platform, name in models:
        module = f"vllm.models.deepseek_v4.{platform}.model"
        lines += [] if has(tree, Name(module, name)) else [f"{module}.{name} is gone"]
        assert name in (PLUG_IN / "names.py").read_text()
    assert not lines, f"vLLM {version}: {'; '.join(lines)}"
