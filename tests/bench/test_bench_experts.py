"""`bench experts` on a CPU: its rows, a wrong result, others' kernels, its mistakes."""

import json
from pathlib import Path

import pytest

from dcpmla.__main__ import main
from dcpmla.bench.experts import SHAPES, ExpertsInputs, Shape
from dcpmla.model.experts import ExpertWeights, compute_experts

pytestmark = pytest.mark.usefixtures("one_process_on_cpu")
TINY = ["bench", "experts", "--device", "cpu", "--commit", "abc", "--tokens", "1,5", "--shape", "v3-tp4,v4-flash"]


@pytest.fixture(autouse=True)
def _tiny_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "v3-tp4", Shape(256, 128, 6, 2, 1))
    monkeypatch.setitem(SHAPES, "v4-flash", Shape(256, 128, 4, 2, 0))


def test_a_row_for_each_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "experts.json"
    assert main([*TINY, "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    cases = [(row["geometry"], row["weights"], row["tokens"]) for row in rows]
    formats = [("v3-tp4", "bf16"), ("v3-tp4", "fp8"), ("v4-flash", "fp8"), ("v4-flash", "fp4")]
    assert cases == [(*pair, tokens) for pair in formats for tokens in (1, 5)]
    for row in rows:
        num_bytes = 3 * 256 * 128 * {"bf16": 2, "fp8": 1, "fp4": 0.53125}[row["weights"]]
        num_routes = row["tokens"] * (row["top_k"] + row["num_shared"])
        assert row["kernel"] == "dcpmla"
        if row["tokens"] == 1:
            assert row["bytes_read"] == num_routes * num_bytes
        assert row["tflops"] == pytest.approx(num_routes * 6 * 256 * 128 / row["median_us"] / 1e6, abs=6e-4)
        assert row["floor_share"] == pytest.approx(row["floor_us"] / row["median_us"], rel=0.2, abs=1e-3)
        assert row["router_us"] > 0
        assert 0 < row["error"] < 1e-5
    assert "WRONG" not in capsys.readouterr().out


def test_a_wrong_result_is_seen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ours = ExpertsInputs.ours
    monkeypatch.setattr(ExpertsInputs, "ours", lambda inputs, index: ours(inputs, index) * 1.1)
    assert main([*TINY, "--shape", "v3-tp4"]) == 0
    printed = [line for line in capsys.readouterr().out.splitlines() if "of the floor" in line]
    assert len(printed) == 4
    assert all("WRONG: error 0.1" in line or "WRONG: error 0.09" in line for line in printed)


def test_peers_get_rows_or_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that cannot be loaded or run are left out; the others are measured over fp8."""
    pytest.importorskip("triton")
    from benchmarks.peers import experts as expert_peers

    def fail(_: Path, weights: ExpertWeights) -> expert_peers.Experts:
        raise AssertionError("no nvcc\nhere")

    def make(_: Path, weights: ExpertWeights) -> expert_peers.Experts:
        return lambda *routed: compute_experts(*routed, weights)

    peers = {"fake": (Path, make), "broken": (Path, fail), "deep_gemm": expert_peers.PEERS["deep_gemm"]}
    monkeypatch.setattr(expert_peers, "PEERS", peers)
    out = tmp_path / "experts.json"
    assert main([*TINY, "--shape", "v3-tp4", "--peers", str(tmp_path), "--json", str(out)]) == 0
    rows = [(row["weights"], row["tokens"], row["kernel"]) for row in json.loads(out.read_text())["rows"]]
    ours = [("bf16", 1, "dcpmla"), ("bf16", 5, "dcpmla")]
    assert rows == ours + [("fp8", tokens, kernel) for tokens in (1, 5) for kernel in ("dcpmla", "fake")]
    printed = capsys.readouterr().out
    assert "WRONG" not in printed
    assert [line for line in printed.splitlines() if line.startswith("left out")] == [
        f"left out: deep_gemm: --peers is {tmp_path}, which has no deep_gemm.tar.xz",
        "left out: broken of v3-tp4, fp8, 1 tokens: no nvcc",
        "left out: broken of v3-tp4, fp8, 5 tokens: no nvcc",
    ]


def test_mistakes_are_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--shape", "v5"]) == 2
    assert (
        "argument --shape: 'v5' is not a shape; choose from v3-tp4-64, v3-tp4, v2-lite, v4-flash"
        in capfd.readouterr().err
    )
    assert main([*TINY, "--peers", "nowhere"]) == 2
    assert "--peers is nowhere, which is not a directory" in capfd.readouterr().err
