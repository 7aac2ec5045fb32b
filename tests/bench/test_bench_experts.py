"""`bench experts` on a CPU: what it counts, others' kernels."""

from pathlib import Path

import pytest

from dcpmla.bench.experts import SHAPES, Shape
from dcpmla.model.experts import ExpertWeights, compute_experts
from tests.support.benches import measure

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("one_process_on_cpu")]
TINY = "experts --tokens 1,5 --shape v3-tp4,v4-flash"


@pytest.fixture(autouse=True)
def _tiny_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "v3-tp4", Shape(256, 128, 6, 2, 1))
    monkeypatch.setitem(SHAPES, "v4-flash", Shape(256, 128, 4, 2, 0))


def test_bytes_and_flops_of_the_experts_that_are_hit(tmp_path: Path) -> None:
    for row in measure(tmp_path, TINY):
        num_bytes = 3 * 256 * 128 * {"bf16": 2, "fp8": 1, "fp4": 0.53125}[row["weights"]]
        num_routes = row["tokens"] * (row["top_k"] + row["num_shared"])
        assert row["kernel"] == "dcpmla"
        if row["tokens"] == 1:
            assert row["bytes_read"] == num_routes * num_bytes
        assert row["tflops"] == pytest.approx(num_routes * 6 * 256 * 128 / row["median_us"] / 1e6, abs=6e-4)
        assert row["router_us"] > 0


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
    measured = measure(tmp_path, f"{TINY} --shape v3-tp4 --peers {tmp_path}")
    rows = [(row["weights"], row["tokens"], row["kernel"]) for row in measured]
    ours = [("bf16", 1, "dcpmla"), ("bf16", 5, "dcpmla")]
    assert rows == ours + [("fp8", tokens, kernel) for tokens in (1, 5) for kernel in ("dcpmla", "fake")]
    printed = capsys.readouterr().out
    assert "WRONG" not in printed
    assert [line for line in printed.splitlines() if line.startswith("left out")] == [
        f"left out: deep_gemm: --peers is {tmp_path}, which has no deep_gemm.tar.xz",
        "left out: broken of v3-tp4, fp8, tokens 1: no nvcc",
        "left out: broken of v3-tp4, fp8, tokens 5: no nvcc",
    ]
