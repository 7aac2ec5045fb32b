"""`bench prefill` on a CPU: what it counts and selects, what it does with a backend that is wrong, or fails."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dcpmla.attention.backends.calls import PrefillCall
from dcpmla.attention.backends.choice import PREFILL_BACKENDS, Backend, find_backend
from dcpmla.attention.backends.mask import unpack_mask
from dcpmla.bench import prefill as bench_prefill
from tests.support.benches import measure

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("one_process_on_cpu")]
TINY = "prefill --heads 2"


def test_flops_of_pairs_that_are_seen(tmp_path: Path) -> None:
    rows = measure(tmp_path, f"{TINY} --tokens 33,8 --context 50")
    for row, pairs in zip(rows, (33 * 34 // 2, 33 * 50, 8 * 9 // 2, 8 * 50), strict=True):
        assert row["tflops"] == pytest.approx(2 * 2 * (192 + 128) * pairs / row["median_us"] / 1e6, abs=2e-3)


def test_a_backend_that_ignores_the_mask_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = find_backend(PREFILL_BACKENDS, "torch")
    ignoring = replace(right, name="ignoring", run=lambda call: right.run(call._replace(mask=None)))
    monkeypatch.setattr(bench_prefill, "PREFILL_BACKENDS", (right, ignoring))
    rows = measure(tmp_path, f"{TINY} --tokens 33 --context 20,50 --topk 20")
    wrong = [(row["kernel"], row["topk"]) for row in rows if bench_prefill.PrefillBenchmark.wrong(row)]
    assert wrong == [("ignoring", 20)] * 2
    assert capsys.readouterr().out.count("WRONG: ") == 2


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
    rows = measure(tmp_path, f"{TINY} --tokens 40 --context 24")
    assert [row["kernel"] for row in rows] == ["right", "scaled", "base 2", "nan"] * 2
    errors = {"scaled": pytest.approx(0.05, rel=1e-3), "nan": None}
    for row in rows:
        assert row["error"] == errors.get(row["kernel"], pytest.approx(0, abs=1e-5))
        assert (row["lse_error"] > 0.02) == (row["kernel"] == "base 2")
    lines = capsys.readouterr().out.splitlines()
    assert [" WRONG" in line for line in lines if "TFLOP/s" in line] == [False, True, True, True] * 2
    assert "left out: failing of heads 2, tokens 40, context 24: no kernel image" in lines
