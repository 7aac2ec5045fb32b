"""docs/support.md: what recorded tests have shown, family by family."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launchers import ROOT, python_path
from tests.support.ranks import run_ranks

sys.path.append(str(ROOT / "launch"))
from features import FEATURES, collect  # noqa: E402
from write_support import PAGE, RECORD, ROWS, cell_of, read, render, short  # noqa: E402

RECORDED = """
import sys
from pathlib import Path
import torch
from dcpmla import LLM, DCPConfig, SamplingParams
options = {"kv_cache_dtype": "fp8", "max_num_batched_tokens": 16, "kv_cache_memory_bytes": 1 << 22, "dtype": "float32"}
params = SamplingParams(max_new_tokens=2, ignore_eos=True)
with LLM(sys.argv[1], **options) as llm:
    for _ in range(2):
        llm.engine.add(list(range(1, 100)), params)
        list(llm.engine.run())
try:
    LLM(sys.argv[1], speculative_method="mtp")
except ValueError:
    pass
"""


def line(test: str, device: str = "cpu", tp: int = 1, **found: list[str]) -> str:
    return json.dumps({"test": test, "family": "deepseek_v3", "device": device, "tp": tp, "dcp": 1} | found)


def test_the_page_is_the_record_s() -> None:
    """`python launch/write_support.py` writes it anew."""
    assert PAGE.read_text() == render(read(RECORD))


def test_engines_are_observed(model: Path, tmp_path: Path) -> None:
    """A process of a recorded run writes what its engine does: no option says that a prompt comes in pieces."""
    variables = {"DCPMLA_OBSERVATIONS": str(tmp_path), "PYTEST_CURRENT_TEST": "tests/x.py::test_y[1] (call)"}
    env = {**os.environ, **variables}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DCPMLA_OBSERVATIONS", str(tmp_path))
        env["PYTHONPATH"] = python_path(ROOT)
    subprocess.run([sys.executable, "-c", RECORDED, model], env=env, cwd=ROOT, check=True, capture_output=True)
    features = collect(tmp_path, {"tests/x.py::test_y[1]"})
    shown = {"count": 1, "tests": ["tests/x.py::test_y[1]"], "ranks": 1}
    ran = dict.fromkeys(("8-bit caches", "chunks", "prefix hits"), {"cpu": shown})
    assert features == {"deepseek_v3": {**ran, "drafts": {"refused": shown}}}
    assert not collect(tmp_path, set()), "a test that did not pass counts"


def current_test() -> str:
    return os.environ["PYTEST_CURRENT_TEST"]


def test_ranks_know_the_test() -> None:
    """Their server began in another test."""
    assert run_ranks(2, current_test) == [os.environ["PYTEST_CURRENT_TEST"]] * 2


def test_cells(tmp_path: Path) -> None:
    h200, h100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"
    lines = {
        "cpu": [line(f"tests/a.py::{name}", features=["tp", "dcp"], tp=2) for name in "abcdefg"],
        "gpu": [line("tests/b.py::a", h100, features=["graphs", "dcp"]), line("tests/b.py::a", refused=["drafts"])],
        "gpu_2": [line("tests/b.py::b", h200, 2, features=["dcp"]), line("tests/c.py::c", refused=["dcp", "host"])],
    }
    parts = {}
    for part, written in lines.items():
        (tmp_path / part).mkdir()
        (tmp_path / part / "1.jsonl").write_text("\n".join(written))
        passed = {json.loads(text)["test"] for text in written}
        counts = {"passed": len(passed), "failed": [], "skipped": {"no GPU": 2}}
        features = collect(tmp_path / part, passed)
        parts[part] = {"commit": "8fe6866fa", "cards": [h200], "versions": {"torch": "2.13"}, "features": features}
        parts[part] |= counts
    assert parts["cpu"]["features"]["deepseek_v3"]["tp"]["cpu"]["count"] == 7
    assert len(parts["cpu"]["features"]["deepseek_v3"]["tp"]["cpu"]["tests"]) == 5
    cells = {name: short(cell_of(parts, ("deepseek_v3",), name)) for name in FEATURES}
    assert cells["tp"] == "cpu"
    assert cells["dcp"] == "cpu, gpu, gpu_2"
    assert (cells["graphs"], cells["drafts"], cells["host"]) == ("gpu", "refused", "refused")
    assert cells["vLLM"] == "no record"
    page = render({"parts": parts})
    assert "| [DeepSeek-V3, R1, Kimi-K2](#deepseek-v3-r1-kimi-k2) | cpu | cpu, gpu, gpu_2 |" in page
    assert "| gpu_4 | no record |" in page
    assert "- TP of `deepseek_v3`, cpu: [a.py](../tests/a.py) `a`, " in page
    assert "- drafts of `deepseek_v3`, refused in gpu: [b.py]" in page
    assert "`e`, 2 more" in page


def test_rows_have_all_families() -> None:
    from dcpmla.integrations.families.table import FAMILIES

    types = [name for names in ROWS.values() for name in names]
    assert sorted(types) == sorted([*FAMILIES, "kimi_k3"])
