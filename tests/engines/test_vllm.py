"""vLLM with this package's attention and exchange, on CPUs: its real engine, two ranks, against transformers."""

import ast
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dcpmla.integrations.vllm import CHOSEN_BY_VLLM, END_VERSION, FIRST_VERSION
from tests.engines.conftest import save_model
from tests.engines.trees import metadata, vllm_cpu_tree, vllm_tree, vllm_variables
from tests.engines.vllm_drafts import save_model_with_module
from tests.support.launchers import ROOT, Ended, run_together, torchrun

PLUG_IN = ROOT / "dcpmla" / "integrations" / "vllm"

VERSIONS = ("0.32.0", "0.33.0")  # The engine runs with the last.
SHORT = {"threshold": 32}  # Chunks of up to 100 tokens are then short and long prefills.


def run_engine(tree: Path, model: Path, folder: Path, num_ranks: int = 2, **options: Any) -> tuple[dict[str, Any], str]:
    """Run `vllm_cases.py`: return its report and its stderr."""
    variables = vllm_variables(tree, folder) | {"DCPMLA_VLLM": "default"}
    program = [ROOT / "tests" / "engines" / "vllm_cases.py", model, json.dumps(options)]
    (ended,) = run_together([(torchrun(program, num_ranks), variables)], timeout=500)
    return json.loads(ended.stdout.splitlines()[-1]), ended.stderr


def check_logprobs(report: dict[str, Any]) -> None:
    """Check that all requests but the aborted one ended with transformers' logprobs."""
    for turn, ended in (("first", 20), ("again", 20), ("aborted", 19)):
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
def test_decode_context_parallel_matches_transformers(model: Path, tmp_path: Path, replicates: bool) -> None:
    """TP 2 x DCP 2: prompts of 1 to 300 tokens, 20 at once, in chunks of at most 100 tokens. Chunks of at most 48
    are decodes. Again, from the prefix cache; and once more with a request aborted.
    """
    layout = {"decode_context_parallel_size": 2, "block_size": 16}
    options = {"dcp_q_replicate": True} if replicates else {}
    report, stderr = run_engine(vllm_tree(VERSIONS[-1]), model, tmp_path, **SHORT, **layout, **options)
    check_logprobs(report)
    check_routes(report)
    check_merge(report, replicates)
    assert report["calls"]["several tokens"] == 0
    assert report["exchange alone"]["error"] < 1e-5
    assert report["runner"] == 2, "GPUs have the second"
    assert "dcpmla: exchange a2a" in stderr


def test_four_ranks(model: Path, tmp_path: Path) -> None:
    """TP 4 x DCP 4 in groups of 4 tokens; contexts that are cached end at any place in a group of ranks."""
    layout = {"decode_context_parallel_size": 4, "cp_kv_cache_interleave_size": 4, "block_size": 16}
    report, _ = run_engine(vllm_tree(VERSIONS[-1]), model, tmp_path, num_ranks=4, **SHORT, **layout)
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
    report, _ = run_engine(vllm_tree(VERSIONS[-1]), model, tmp_path, **SHORT, **layout, speculative_config=drafts)
    check_logprobs(report)
    check_routes(report)
    check_merge(report)
    for part, fewest in (("calls", 10), ("warm-up", 8)):
        assert report[part]["several tokens"] > fewest
    assert report["drafts"]["made"] > 400
    assert report["drafts"]["right"] > 0.99 * report["drafts"]["made"]  # Ties may go either way.
    assert report["calls"]["update_draft_decode_metadata"] > 10, "vLLM lays out each draft anew"


def test_whole_caches_match_transformers(model: Path, tmp_path: Path) -> None:
    """TP 2 x DCP 1: nothing is exchanged, and queries come in the two parts that vLLM has; kv_b_proj is quantized. All
    chunks are decodes for the plug-in's own threshold.
    """
    report, _ = run_engine(vllm_tree(VERSIONS[-1]), model, tmp_path, quantization="rounded")
    check_logprobs(report)
    calls = report["calls"]
    assert calls["pieces"] > 100
    assert "dcp_mla_prefill" not in calls
    assert calls["queries in two parts"] == calls["dcp_mla_decode"]
    assert not {"gather_heads", "combine"} & set(calls)


@pytest.mark.parametrize("short", [False, True], ids=["up-projected prompts", "absorbed prompts"])
def test_caches_in_8_bits(model: Path, tmp_path: Path, short: bool) -> None:
    """vLLM's latents and its absorbed queries, both in e4m3: transformers' logprobs over such values."""
    options = {"decode_context_parallel_size": 2, "kv_cache_dtype": "fp8"} | ({} if short else {"threshold": 1})
    report, _ = run_engine(vllm_tree(VERSIONS[-1]), model, tmp_path, **options)
    assert ("pieces" if short else "dcp_mla_prefill") in +Counter(report["calls"])
    # Processors round differently, and a value between two codes of e4m3 may get the other one: 0.018 on one of them.
    assert report["over rounded"] < 0.05
    assert report["over exact"] > 0.2


def test_experts_match_transformers(tmp_path: Path) -> None:
    """TP 2 x DCP 2 with a layer of experts, for which vLLM has nothing on CPUs but compiled kernels."""
    model = save_model(tmp_path / "model", num_heads=8, head_dim=32, num_dense=1)
    report, _ = run_engine(vllm_cpu_tree(VERSIONS[0]), model, tmp_path, **SHORT, decode_context_parallel_size=2)
    check_logprobs(report)
    check_routes(report)
    check_merge(report)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_name_is_there(version: str) -> None:
    """All that the plug-in imports from vLLM, and the methods that it replaces or overrides, in vLLM's own files."""
    tree = vllm_tree(version)
    imported = {name: module for path in PLUG_IN.glob("*.py") for module, name in imports_from_vllm(path)}
    assert len(imported) > 10
    moved = [f"{module}.{name}" for name, module in imported.items() if name not in definitions(tree, module)]
    assert not moved, f"vLLM {version} has moved {moved}"
    members = {
        target.id
        for node in definitions(tree, imported["AttentionBackendEnum"])["AttentionBackendEnum"].body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    assert {"CUSTOM", *CHOSEN_BY_VLLM} <= members
    for owner, methods in read_methods().items():
        lacking = {
            name: sorted(set(arguments) - arguments_of(tree, imported[owner], owner, name))
            for name, arguments in methods.items()
        }
        assert not any(lacking.values()), f"vLLM {version}: methods of {owner} lack {lacking}"


def imports_from_vllm(path: Path) -> list[tuple[str, str]]:
    """Return (module, name) of each name that a file imports from vLLM."""
    return [
        (node.module, alias.name)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm")
        for alias in node.names
    ]


def definitions(tree: Path, module: str) -> dict[str, Any]:
    """Return what a module of a tree defines or imports at its top, by name: the node of each."""
    path = tree / module.replace(".", "/")
    text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    found: dict[str, Any] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.ImportFrom | ast.Import):
            found |= {alias.asname or alias.name: node for alias in node.names}
    return found


def read_methods(names: Path = PLUG_IN / "names.py") -> dict[str, dict[str, tuple[str, ...]]]:
    """Return METHODS of a file with the names of its classes, from its text: vLLM cannot be imported here."""
    for node in ast.parse(names.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            pairs = zip(node.value.keys, node.value.values, strict=True)
            return {key.id: ast.literal_eval(value) for key, value in pairs if isinstance(key, ast.Name)}
    raise AssertionError("names.py has no METHODS")


def arguments_of(tree: Path, module: str, owner: str, method: str) -> set[str]:
    """Return the arguments of a method of a class or of the first class above it that has the method."""
    classes = definitions(tree, module) | definitions(tree, "vllm.v1.attention.backend")
    queue = [owner]
    while queue:
        node = classes.get(queue.pop(0))
        if not isinstance(node, ast.ClassDef):
            continue
        for member in node.body:
            if isinstance(member, ast.FunctionDef) and member.name == method:
                return {argument.arg for argument in [*member.args.args, *member.args.kwonlyargs]}
        bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
        queue += [base.id for base in bases if isinstance(base, ast.Name)]
    return set()


def test_the_versions_tested_are_those_declared() -> None:
    (requirement,) = metadata()["optional-dependencies"]["vllm"]
    first, end = (".".join(map(str, version)) for version in (FIRST_VERSION, END_VERSION))
    assert requirement == f"vllm>={first},<{end}"
    minors = [tuple(map(int, version.split(".")[:2])) for version in VERSIONS]
    assert minors[0] == FIRST_VERSION
    assert (minors[-1][0], minors[-1][1] + 1) == END_VERSION


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
