"""`bench decode` on a CPU, beside peers written in torch; its inputs and answers."""

import json
import math
import re
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.peers.attention import FlashMLA, load_kernel
from dcpmla.bench.ceilings import Ceilings
from dcpmla.bench.decode_inputs import SCALE, Answer, Caches, DecodeCase, DecodeInputs
from dcpmla.bench.peers import Ours
from dcpmla.bench.timing import ROTATED_BYTES
from dcpmla.cache.formats import to_latents
from tests.support.benches import measure
from tests.support.fake_peers import write_peers

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("one_process_on_cpu")]
CPU = torch.device("cpu")
FORMATS = [("bf16", "auto"), ("fp8", "auto"), ("fp8", "fp8"), ("fp8_ds_mla", "auto")]


@pytest.fixture
def peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("flashinfer", "flashinfer.mla"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return write_peers(tmp_path)


def test_all_kernels_in_one_run(peers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = ["dcpmla", "dcpmla-torch"], ["flashmla", "fa3", "flashinfer"]
    kernels = [*ours, *theirs, "flashmla-fp8", "flashmla-sparse"]
    read = {
        ("bf16", "auto"): [*ours, *theirs],
        ("fp8", "auto"): ours,
        ("fp8", "fp8"): [*ours, "flashmla-fp8"],
        ("fp8_ds_mla", "auto"): ours,
    }
    sizes = "--heads 3 --batch 3 --context 70 --query-len 1,2 --kv-cache-dtype fp8_ds_mla,fp8,bf16 --dtype bfloat16"
    found = measure(tmp_path, f"decode --peers {peers} --kernels {','.join(kernels)} {sizes}")
    keys = "batch", "context", "query_len", "kv_cache_dtype", "decode_query_dtype", "kernel"
    rows = {tuple(row[key] for key in keys): row for row in found}
    cases = product((3,), (70,), (1, 2), FORMATS)
    assert set(rows) == {(*sizes, *dtypes, kernel) for *sizes, dtypes in cases for kernel in read[dtypes]}
    ceilings = Ceilings(**json.loads((tmp_path / "bench.json").read_text())["ceilings"])
    for (batch, context, query_len, *dtypes, kernel), row in rows.items():
        case = DecodeCase(batch, context, 3, query_len, *dtypes)
        assert (row["heads"], row["block_size"], row["dtype"]) == (3, 64, "bfloat16")
        floor_us = ceilings.floor_us(case.num_bytes(2), case.flops, in_fp8=dtypes[1] == "fp8")
        assert row["floor_us"] == pytest.approx(floor_us, abs=0.006)
        assert row["tflops"] * row["median_us"] == pytest.approx(case.flops / 1e6, abs=0.001 * row["median_us"])
        is_wrong = kernel == "fa3" and query_len == 2  # it is deaf to the causal bound
        assert (row["error"] > 0.02) == is_wrong
        assert is_wrong or row["error"] < 0.005
        assert is_wrong or row["lse_error"] < 1e-3
        others = [name for name in read[tuple(dtypes)] if name not in ours and (name, query_len) != ("fa3", 2)]
        others += [] if dtypes[0] == "bf16" else ["bf16"]
        ratios = {name: value for name, value in row.items() if name.startswith("speedup_over_")}
        assert set(ratios) == ({f"speedup_over_{name}" for name in others} if kernel in ours else set())
        plain = batch, context, query_len, "bf16", "auto"
        for other, place in (("flashmla", (*plain, "flashmla")), ("bf16", (*plain, kernel))):
            if f"speedup_over_{other}" in ratios:
                ratio = rows[place]["median_us"] / row["median_us"]
                assert ratios[f"speedup_over_{other}"] == pytest.approx(ratio, abs=1e-3)
    report = capsys.readouterr().out
    assert report.count("WRONG") == 1
    assert "fa3: 1 of 2 wrong" in report
    assert re.search(r"^dcpmla: 0 of 2 wrong, .*speedup_over_flashinfer .* in the median", report, re.MULTILINE)
    assert re.search(
        r"^dcpmla, kv_cache_dtype fp8, decode_query_dtype fp8: .*speedup_over_flashmla-fp8 ", report, re.MULTILINE
    )
    assert re.search(r"^dcpmla, kv_cache_dtype fp8_ds_mla: .*speedup_over_bf16 ", report, re.MULTILINE)
    assert report.count("query_len 1, kv_cache_dtype fp8_ds_mla: takes 64 or 128") == report.count("left out: ") == 1


def test_what_a_peer_cannot_do_is_said_once(peers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (peers / "peers.py").read_text()
    (peers / "peers.py").write_text(text.replace("def load_fa3(): pass", "def load_fa3(): open('/gone.so')"))
    sizes = "--heads 3 --batch 1 --context 64,96 --query-len 1 --block-size 32"
    rows = measure(tmp_path, f"decode --peers {peers} {sizes}")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("left out: ")]
    assert [line.split(": ")[1] for line in lines] == ["fa3", "flashmla of batch 1, context 64, heads 3, query_len 1"]
    assert "gone.so" in lines[0]
    assert "blocks of 64 tokens, not of 32" in lines[1]
    assert {row["kernel"] for row in rows} == {"dcpmla", "flashinfer"}


# ---- its parts


@pytest.mark.parametrize(("batch", "context", "query_len"), [(1, 1, 1), (3, 7, 1), (2, 9, 4), (1, 4, 4)])
def test_flops_and_bytes_are_counted_key_by_key(batch: int, context: int, query_len: int) -> None:
    case = DecodeCase(batch, context, 5, query_len)
    flops = num_bytes = 0
    for _ in range(batch):
        num_bytes += context * 576 * 2
        for position in range(context - query_len, context):
            num_bytes += 5 * (576 + 512) * 2
            flops += sum(2 * 5 * (576 + 512) for key in range(context) if key <= position)
    assert (case.flops, case.num_bytes(2)) == (flops, num_bytes)
    fewer = [
        num_bytes - case._replace(kv_cache_dtype=cache, decode_query_dtype=queries).num_bytes(2)
        for cache, queries in FORMATS[1:]
    ]
    per_token = batch * context * 576, batch * query_len * 5 * 576
    assert fewer == [per_token[0], sum(per_token), batch * context * (1152 - 656)]


@pytest.mark.parametrize("dtypes", FORMATS)
def test_answers_see_what_is_wrong(dtypes: tuple[str, str]) -> None:
    """Latents are normal, unsaturated; of the newest keys the last one is exp's way to make up for the context."""
    torch.manual_seed(0)
    caches = Caches(3, 70, 32, torch.float32, CPU, dtypes[0])
    blocks = caches.rows[1][caches.block_tables[1].long()].flatten(1, 2)
    latents = to_latents(blocks, 512, caches.kv_scale, torch.float32)
    assert caches.rows.nbytes >= ROTATED_BYTES["cpu"]
    assert float(latents[..., :-1].std()) == pytest.approx(1.0, abs=0.02)
    mark = (2 + math.log(70) / 2) / (8 * SCALE)
    torch.testing.assert_close(latents[:, 66:70, -1], torch.full((3, 4), mark), rtol=1 / 16, atol=0)
    inputs = DecodeInputs(DecodeCase(3, 70, 4, 2, *dtypes), caches)
    kernel, answer = Ours(inputs), Answer(inputs, 1)
    right, lse = kernel.result(*kernel.launch(1))
    assert answer.tokens.tolist() == [0, 1, 4, 5]
    assert max(answer.errors(right, lse)) < 1e-5
    assert max(answer.errors(*kernel.launch(1 + len(caches)))) < 1e-5  # the same set
    assert min(Answer(inputs, 0).errors(right, lse)) > 0.1  # the set of another call
    inputs.seq_lens = inputs.seq_lens.max().expand(6).contiguous()
    assert min(answer.errors(*kernel.launch(1))) > 0.1  # the causal bound is missed


@pytest.mark.parametrize("query_len", [1, 2])
def test_flashmla_sparse_takes_all_tokens(peers: Path, query_len: int) -> None:
    inputs = DecodeInputs(
        DecodeCase(2, 70, 64, query_len, "fp8_ds_mla"), Caches(2, 70, 32, torch.bfloat16, CPU, "fp8_ds_mla")
    )
    kernel = load_kernel("flashmla-sparse", peers)(inputs)
    assert max(Answer(inputs, 1).errors(*kernel.result(*kernel.launch(1)))) < 0.005
    with pytest.raises(ValueError, match="takes 64 or 128 heads, not 16"):
        load_kernel("flashmla-sparse", peers)(DecodeInputs(DecodeCase(2, 70, 16, 1, "fp8_ds_mla"), inputs.caches))


def test_flashmla_says_empty_by_infinity() -> None:
    inputs: Any = type("Inputs", (), {"block_size": 64, "q_scale": None})()
    peers: Any = type("Peers", (), {"FlashMLADense": staticmethod(lambda: None)})
    lse = torch.tensor([[[1.0, math.inf], [2.0, 3.0]]])  # [batch, H, query_len]
    out, rows = FlashMLA(peers, inputs).result(torch.zeros(1, 2, 2, 512), lse)
    assert out.shape == (2, 2, 512)
    assert rows.tolist() == [[1.0, 2.0], [-math.inf, 3.0]]
