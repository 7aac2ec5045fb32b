"""`bench prefill` on a CPU: what it counts and selects, what it does with a backend that fails."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dcpmla.attention.backends.calls import PrefillCall
from dcpmla.attention.backends.choice import PREFILL_BACKENDS, find_backend
from dcpmla.attention.backends.mask import unpack_mask
from dcpmla.bench import prefill as bench_prefill
from tests.support.benches import measure

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("one_process_on_cpu")]


@pytest.mark.parametrize(("tokens", "context"), [(30, 0), (7, 64)])
def test_a_token_selects_topk_keys_or_all_that_it_sees(tokens: int, context: int) -> None:
    case = bench_prefill.PrefillCase(1, tokens, context, topk=12)
    mask = bench_prefill.PrefillInputs(case, torch.float32, torch.device("cpu")).mask
    assert mask is not None
    bits = unpack_mask(mask, case.num_keys)
    assert bits.sum(1).tolist() == [min(12, token + 1) if context == 0 else 12 for token in range(tokens)]
    if context == 0:
        assert torch.equal(bits, bits.tril())


def fail(call: PrefillCall) -> tuple[Tensor, Tensor]:
    raise RuntimeError("no kernel image\nand a long list")


def test_flops_are_of_pairs_that_are_seen_and_what_fails_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = find_backend(PREFILL_BACKENDS, "torch")
    monkeypatch.setattr(bench_prefill, "PREFILL_BACKENDS", (right, replace(right, name="failing", run=fail)))
    rows = measure(tmp_path, "prefill --heads 2 --tokens 33,8 --context 50")
    for row, pairs in zip(rows, (33 * 34 // 2, 33 * 50, 8 * 9 // 2, 8 * 50), strict=True):
        assert row["kernel"] == "torch"
        assert row["tflops"] == pytest.approx(2 * 2 * (192 + 128) * pairs / row["median_us"] / 1e6, abs=2e-3)
    assert "left out: failing of heads 2, tokens 33, context 50: no kernel image\n" in capsys.readouterr().out
