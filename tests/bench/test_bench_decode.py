"""`bench decode` on a CPU, beside peers written in torch; its floors, inputs and answers."""

import json
import math
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.peers.attention import FlashMLA, load_kernel
from dcpmla.__main__ import main
from dcpmla.bench.ceilings import Ceilings
from dcpmla.bench.decode import OURS
from dcpmla.bench.decode_inputs import SCALE, Answer, Caches, DecodeCase, DecodeInputs, Ours
from dcpmla.bench.timing import ROTATED_BYTES
from dcpmla.cache.formats import to_latents
from tests.support.fake_peers import write_peers
from tests.support.launchers import run_together

pytestmark = pytest.mark.usefixtures("one_process_on_cpu")
CPU = torch.device("cpu")
H200 = Ceilings(794e12, 4.46e12, 1500e12)
FORMATS = [("bf16", "auto"), ("fp8", "auto"), ("fp8", "fp8"), ("fp8_ds_mla", "auto")]


@pytest.fixture
def peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("flashinfer", "flashinfer.mla"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return write_peers(tmp_path)


def bench(*options: object) -> int:
    return main(["bench", "decode", "--device", "cpu", "--heads", "3", *map(str, options)])


def test_all_kernels_in_one_run(peers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plot = tmp_path / "decode.json", tmp_path / "decode.png"
    sizes = ["--batch", "3", "--context", "70", "--query-len", "1,2"]
    ours, theirs = ["dcpmla", "dcpmla-torch"], ["flashmla", "fa3", "flashinfer"]
    kernels = [*ours, *theirs, "flashmla-fp8", "flashmla-sparse"]
    read = {
        ("bf16", "auto"): [*ours, *theirs],
        ("fp8", "auto"): ours,
        ("fp8", "fp8"): [*ours, "flashmla-fp8"],
        ("fp8_ds_mla", "auto"): ours,
    }
    options = ["--kernels", ",".join(kernels), "--dtype", "bfloat16", "--json", out, "--plot", plot, "--commit", "abc"]
    assert bench("--peers", peers, *sizes, "--kv-cache-dtype", "fp8_ds_mla,fp8,bf16", *options) == 0
    content = json.loads(out.read_text())
    assert list(content) == ["commit", "machine", "versions", "rows", "ceilings"]
    assert (content["commit"], content["machine"]) == ("abc", "1 x CPU")
    keys = "batch", "context", "query_len", "kv_cache_dtype", "decode_query_dtype", "kernel"
    rows = {tuple(row[key] for key in keys): row for row in content["rows"]}
    cases = product((3,), (70,), (1, 2), FORMATS)
    assert set(rows) == {(*sizes, *dtypes, kernel) for *sizes, dtypes in cases for kernel in read[dtypes]}
    ceilings = Ceilings(**content["ceilings"])
    for (batch, context, query_len, *dtypes, kernel), row in rows.items():
        case = DecodeCase(batch, context, 3, query_len, *dtypes)
        assert (row["heads"], row["block_size"], row["dtype"], row["in_graph"]) == (3, 64, "bfloat16", False)
        assert row["median_us"] > 0
        assert row["floor_us"] == pytest.approx(case.floor_us(ceilings, 2), abs=0.006)
        assert row["tflops"] * row["median_us"] == pytest.approx(case.flops / 1e6, abs=0.01 * row["median_us"])
        is_wrong = kernel == "fa3" and query_len == 2  # it is deaf to the causal bound
        assert (row["error"] > 0.02) == is_wrong
        assert is_wrong or row["error"] < 0.005
        assert is_wrong or row["lse_error"] < 1e-3
        ratios = {name: value for name, value in row.items() if name.startswith("speedup_over_")}
        if kernel in ours:
            others = [name for name in read[tuple(dtypes)] if name not in ours and (name, query_len) != ("fa3", 2)]
            others += [] if dtypes[0] == "bf16" else ["bf16"]
            assert set(ratios) == {f"speedup_over_{name}" for name in others}
            plain = batch, context, query_len, "bf16", "auto"
            for other, place in (("flashmla", (*plain, "flashmla")), ("bf16", (*plain, kernel))):
                if other in others:
                    assert ratios[f"speedup_over_{other}"] == pytest.approx(
                        rows[place]["median_us"] / row["median_us"], abs=1e-3
                    )
        else:
            assert not ratios
    report = capsys.readouterr().out
    assert report.count("WRONG") == 1
    assert "of 2 cases, 1 of them wrong" in report
    assert "dcpmla against flashinfer: " in report
    assert "dcpmla, fp8 cache and queries against flashmla-fp8: " in report
    assert "dcpmla, fp8_ds_mla cache against bf16: " in report
    assert (
        report.count(
            "left out: flashmla-sparse of 3 x 70, 3 heads, 1 new, fp8_ds_mla cache: takes 64 or 128 heads, not 3"
        )
        == 1
    )
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_what_a_peer_cannot_do_is_said_once(peers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (peers / "peers.py").write_text(
        (peers / "peers.py").read_text().replace("def load_fa3(): pass", "def load_fa3(): open('/gone.so')")
    )
    out = tmp_path / "decode.json"
    assert (
        bench("--peers", peers, "--batch", 1, "--context", "64,96", "--query-len", 1, "--block-size", 32, "--json", out)
        == 0
    )
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("left out: ")]
    assert [line.split(": ")[1] for line in lines] == ["fa3", "flashmla of 1 x 64, 3 heads, 1 new"]
    assert "gone.so" in lines[0]
    assert "blocks of 64 tokens, not of 32" in lines[1]
    assert {row["kernel"] for row in json.loads(out.read_text())["rows"]} == {"dcpmla", "flashinfer"}


def test_time_may_be_over(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcpmla.bench.runner.TimeLimit.is_over", lambda _: True)
    assert (
        bench("--batch", 2, "--context", 64, "--json", tmp_path / "decode.json", "--plot", tmp_path / "decode.png") == 0
    )
    assert "time is over (--time-limit): 2 x 64, 3 heads, 1 new and what follows is left out" in capsys.readouterr().out
    assert json.loads((tmp_path / "decode.json").read_text())["rows"] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kernels", "dcpmla,flash"], "'flash' is not a kernel; choose from dcpmla"),
        (["--kernels", "fa3"], "--kernels has fa3, which is loaded from --peers; give --peers DIR"),
        (
            ["--kernels", "flashmla-fp8", "--peers", "."],
            "--kernels has flashmla-fp8, which reads what --kv-cache-dtype fp8 and",
        ),
        (["--kv-cache-dtype", "fp8,int8"], "'int8' is not a cache format; choose from bf16, fp8, fp8_ds_mla"),
        (["--decode-query-dtype", "e5m2"], "'e5m2' is not a dtype of queries; choose from auto, fp8"),
        (["--peers", "/nowhere"], "--peers is /nowhere, which has no peers.py"),
        (["--query-len", "4", "--context", "3"], "--query-len has 4 and --context 3"),
        (["--json", "/nowhere/out.json"], "--json is /nowhere/out.json"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
    ],
)
def test_mistakes_are_one_line(options: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert bench(*options) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert len(captured.err.strip().splitlines()) == 1


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


@pytest.mark.parametrize(
    ("batch", "context", "heads", "dtypes", "floor_us"),
    [
        (128, 4096, 128, FORMATS[0], 184),
        (128, 4096, 16, FORMATS[0], 136.4),
        (1, 65536, 128, FORMATS[0], 23),
        (32, 16384, 128, FORMATS[1], 183.9),
        (32, 16384, 128, FORMATS[2], 97.3),
        (128, 4096, 16, FORMATS[2], 68.5),
    ],
)
def test_floors_of_an_h200(batch: int, context: int, heads: int, dtypes: tuple[str, str], floor_us: float) -> None:
    """Memory bounds those of 16 heads, compute the others: e4m3 products where queries are in e4m3."""
    assert DecodeCase(batch, context, heads, 1, *dtypes).floor_us(H200, 2) == pytest.approx(floor_us, rel=0.01)


@pytest.mark.parametrize(("dtypes", "width"), [*zip(FORMATS, (576, 576, 576, 656), strict=True)])
def test_inputs_rotate(dtypes: tuple[str, str], width: int) -> None:
    inputs = DecodeInputs(DecodeCase(2, 70, 3, 2, *dtypes), Caches(2, 70, 32, torch.float32, CPU, dtypes[0]))
    num_sets = len(inputs.caches)
    assert inputs.caches.rows.nbytes >= ROTATED_BYTES["cpu"]
    assert inputs.seq_lens.tolist() == [69, 70, 69, 70]
    assert (inputs.context_lens.tolist(), inputs.query_start_loc.tolist()) == ([70, 70], [0, 2, 4])
    calls = [inputs.at(index) for index in range(num_sets + 1)]
    for tensors in zip(*calls[:-1], strict=True):
        assert len({tensor.data_ptr() for tensor in tensors}) == num_sets
    assert [tensor.data_ptr() for tensor in calls[0]] == [tensor.data_ptr() for tensor in calls[-1]]
    for q, kv_cache, table in calls:
        assert (q.shape, kv_cache.shape) == ((4, 3, 576), (6, 32, width))
        assert sorted(table.flatten().tolist()) == list(range(6))


@pytest.mark.parametrize("dtypes", FORMATS)
def test_answers_see_what_is_wrong(dtypes: tuple[str, str]) -> None:
    torch.manual_seed(0)
    inputs = DecodeInputs(DecodeCase(3, 70, 4, 2, *dtypes), Caches(3, 70, 32, torch.float32, CPU, dtypes[0]))
    kernel = Ours(inputs)
    right, lse = kernel.result(*kernel.launch(1))
    answer = Answer(inputs, 1)
    assert answer.tokens.tolist() == [0, 1, 4, 5]
    assert max(answer.errors(right, lse)) < 1e-5
    assert min(Answer(inputs, 0).errors(right, lse)) > 0.1  # the set of another call
    assert answer.errors(1.1 * right, lse)[0] == pytest.approx(0.1, rel=1e-3)
    assert answer.errors(right, lse + 0.3)[1] == pytest.approx(0.3, rel=1e-3)
    right[4, 0, 0] = torch.nan
    assert math.isnan(answer.errors(right, lse)[0])
    inputs.seq_lens = inputs.seq_lens.max().expand(6).contiguous()
    assert min(answer.errors(*kernel.launch(1))) > 0.1  # the causal bound is missed


@pytest.mark.parametrize("kv_cache_dtype", ["bf16", "fp8", "fp8_ds_mla"])
def test_latents_are_normal_in_every_format(kv_cache_dtype: str) -> None:
    """And of those of the newest keys the last one is exp's way to make up for the context, unsaturated."""
    caches = Caches(2, 70, 32, torch.float32, CPU, kv_cache_dtype)
    latents = to_latents(
        caches.rows[1][caches.block_tables[1].long()].flatten(1, 2), 512, caches.kv_scale, torch.float32
    )
    assert latents.shape == (2, 96, 576)
    assert float(latents[..., :-1].std()) == pytest.approx(1.0, abs=0.02)
    assert float(latents[:, :66].std()) == pytest.approx(1.0, abs=0.02)
    mark = (2 + math.log(70) / 2) / (8 * SCALE)
    torch.testing.assert_close(latents[:, 66:70, -1], torch.full((2, 4), mark), rtol=1 / 16, atol=0)


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


@pytest.mark.alone
@pytest.mark.gpu
def test_ours_in_a_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # GPUs may be seen again
    out = tmp_path / "decode.json"
    sizes = ["--heads", "16,128", "--batch", "1,8", "--context", "1000,4096", "--query-len", "1,3"]
    dtypes = ["--kv-cache-dtype", "bf16,fp8,fp8_ds_mla"]
    run_together([([sys.executable, "-m", "dcpmla", "bench", "decode", *sizes, *dtypes, "--json", out], {})])
    content = json.loads(out.read_text())
    assert 200e12 < content["ceilings"]["flops_per_second"] < 1100e12
    assert 1.5 < content["ceilings"]["fp8_flops_per_second"] / content["ceilings"]["flops_per_second"] < 2.5
    assert 1e12 < content["ceilings"]["bytes_per_second"] < 6e12
    assert len(content["rows"]) == 16 * len(FORMATS)
    for row in content["rows"]:
        assert row["in_graph"]
        # Of fp8 products, probabilities are rounded to e4m3, and sums keep fewer bits.
        limit = 0.03 if row["decode_query_dtype"] == "fp8" else 0.01
        assert row["error"] < limit
        assert row["lse_error"] < limit
        assert 0 < row["floor_share"] < 1.2


def test_kernels_by_name() -> None:
    inputs = DecodeInputs(DecodeCase(1, 64, 2, 1), Caches(1, 64, 64, torch.float32, CPU))
    out, _ = Ours(inputs, OURS["dcpmla"]).launch(0)
    torch.testing.assert_close(Ours(inputs, OURS["dcpmla-torch"]).launch(0)[0], out)
    with pytest.raises(ValueError, match="does not take this call"):
        Ours(inputs, OURS["dcpmla-triton"]).launch(0)
