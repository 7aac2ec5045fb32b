"""`bench prefill` on a CPU: its rows, files and mistakes; what it does with a backend that is wrong, or fails."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dcpmla.__main__ import main
from dcpmla.attention.backends.calls import PrefillCall
from dcpmla.attention.backends.choice import PREFILL_BACKENDS, Backend, find_backend
from dcpmla.attention.backends.mask import unpack_mask
from dcpmla.bench import prefill as bench_prefill
from tests.support.launchers import run_together

pytestmark = pytest.mark.usefixtures("one_process_on_cpu")
TINY = ["bench", "prefill", "--device", "cpu", "--heads", "2", "--commit", "abc"]


def test_a_row_for_each_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plot = tmp_path / "prefill.json", tmp_path / "prefill.png"
    assert main([*TINY, "--tokens", "33,8", "--context", "50", "--json", str(out), "--plot", str(plot)]) == 0
    content = json.loads(out.read_text())
    assert (content["commit"], content["machine"]) == ("abc", "1 x CPU")
    rows = content["rows"]
    cases = [(row["kernel"], row["tokens"], row["context"], row["causal"]) for row in rows]
    assert cases == [("torch", 33, 0, True), ("torch", 33, 50, False), ("torch", 8, 0, True), ("torch", 8, 50, False)]
    for row, pairs in zip(rows, (33 * 34 // 2, 33 * 50, 8 * 9 // 2, 8 * 50), strict=True):
        assert (row["heads"], row["dtype"], row["in_graph"]) == (2, "float32", False)
        assert row["median_us"] > 0
        assert row["tflops"] == pytest.approx(2 * 2 * (192 + 128) * pairs / row["median_us"] / 1e6, abs=2e-3)
        assert 0 < row["error"] < 1e-5
        assert 0 < row["lse_error"] < 1e-4
    printed = capsys.readouterr().out
    assert "33 new tokens over themselves" in printed
    assert "8 new tokens over 50" in printed
    assert "WRONG" not in printed
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_rows_under_a_mask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """After each case with more keys than are selected; a backend that ignores the mask is wrong."""
    right = find_backend(PREFILL_BACKENDS, "torch")
    ignoring = replace(right, name="ignoring", run=lambda call: right.run(call._replace(mask=None)))
    monkeypatch.setattr(bench_prefill, "PREFILL_BACKENDS", (right, ignoring))
    out, plot = tmp_path / "prefill.json", tmp_path / "prefill.png"
    options = ["--tokens", "33", "--context", "20,50", "--topk", "20", "--json", str(out), "--plot", str(plot)]
    assert main([*TINY, *options]) == 0
    rows = [row for row in json.loads(out.read_text())["rows"] if row["kernel"] == "torch"]
    cases = [(row["context"], row["topk"]) for row in rows]
    assert cases == [(0, None), (0, 20), (20, None), (50, None), (50, 20)]
    assert all(0 < row["error"] < 1e-5 and row["lse_error"] < 1e-4 for row in rows)
    lines = [line for line in capsys.readouterr().out.splitlines() if "TFLOP/s" in line]
    assert [" WRONG" in line for line in lines] == ["ignoring" in line and "top 20" in line for line in lines]
    assert plot.exists()


@pytest.mark.parametrize(("tokens", "context"), [(30, 0), (7, 64)])
def test_a_token_selects_topk_keys_or_all_that_it_sees(tokens: int, context: int) -> None:
    case = bench_prefill.PrefillCase(1, tokens, context, topk=12)
    mask = bench_prefill.PrefillInputs(case, torch.float32, torch.device("cpu")).mask
    assert mask is not None
    bits = unpack_mask(mask, case.num_keys)
    assert bits.sum(1).tolist() == [min(12, token + 1) if context == 0 else 12 for token in range(tokens)]
    if context == 0:
        assert torch.equal(bits, bits.tril())


def backend(name: str, change: Any) -> Backend[PrefillCall]:
    """Plain torch, its (out, lse) changed."""
    torch_backend = find_backend(PREFILL_BACKENDS, "torch")
    return replace(torch_backend, name=name, run=lambda call: change(*torch_backend.run(call)))


def fail(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    raise RuntimeError("no kernel image\nand a long list")


def test_a_wrong_backend_is_seen_and_a_failing_one_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    backends = (
        backend("right", lambda out, lse: (out, lse)),
        backend("scaled", lambda out, lse: (out * 1.05, lse)),
        backend("base 2", lambda out, lse: (out, lse / 0.6931)),
        backend("nan", lambda out, lse: (out * torch.nan, lse)),
        backend("failing", fail),
    )
    monkeypatch.setattr(bench_prefill, "PREFILL_BACKENDS", backends)
    out = tmp_path / "prefill.json"
    assert main([*TINY, "--tokens", "40", "--context", "24", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["kernel"] for row in rows] == ["right", "scaled", "base 2", "nan"] * 2
    for row in rows:
        assert row["error"] == {"scaled": pytest.approx(0.05, rel=1e-3), "nan": None}.get(
            row["kernel"], pytest.approx(0, abs=1e-5)
        )
        assert (row["lse_error"] > 0.02) == (row["kernel"] == "base 2")
    lines = capsys.readouterr().out.splitlines()
    assert [" WRONG" in line for line in lines if "TFLOP/s" in line] == [False, True, True, True] * 2
    assert "left out: failing of 40 new tokens over 24: no kernel image" in lines


@pytest.mark.alone
@pytest.mark.gpu
def test_backends_in_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # GPUs may be seen again
    out = tmp_path / "prefill.json"
    sizes = ["--tokens", "256,2048", "--context", "4096", "--topk", "1000"]
    run_together([([sys.executable, "-m", "dcpmla", "bench", "prefill", *sizes, "--json", out], {})])
    rows = json.loads(out.read_text())["rows"]
    backends = [row["kernel"] for row in rows]
    assert [backends.count(name) for name in ("triton", "torch")] == [7, 7]
    for row in rows:
        assert row["in_graph"]
        assert row["error"] < 0.01
        assert row["lse_error"] < 0.01


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "0"], "--tokens: '0' is not a whole number"),
        (["--context", "8,"], "--context: '' is not a whole number"),
        (["--heads", "x"], "--heads: 'x' is not a whole number"),
        (["--json", "/nowhere/out.json"], "--json is /nowhere/out.json"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_measured(
    options: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "prefill", *options]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert len(captured.err.strip().splitlines()) == 1
