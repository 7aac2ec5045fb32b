"""Every benchmark on a CPU: a right row for each case, its file, its plot; wrong results; and mistakes."""

import pkgutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from dcpmla.__main__ import main
from dcpmla.attention.backends.calls import PrefillCall
from dcpmla.attention.backends.choice import PREFILL_BACKENDS, find_backend
from dcpmla.bench import linears, timing
from dcpmla.bench.experts import SHAPES, Shape
from dcpmla.bench.results import unknown_fields
from dcpmla.bench.runner import Benchmark
from dcpmla.cli.bench import BENCHMARKS
from tests.support.benches import measure, measure_on_gpus, refuse

pytestmark = pytest.mark.usefixtures("one_process_on_cpu")
SPARSE = "sparse --topk 16 --index-heads 2 --context 70"
PREFILL = "prefill --heads 2 --tokens 33 --context 50"
TURNS = "turns --geometry v2-lite --heads 4"
EXPERTS = "experts --shape v3-tp4,v4-flash"
LINEARS = "linears --shape v3-o-tp4"
LAYER = "layer --geometry tiny --num-layers 2"
CACHES = "bf16,fp8,fp8_ds_mla"
PARTS = "total", "projections", "attention", "output"
QUANTIZED = [("bf16", "auto"), ("fp8", "auto"), ("fp8", "fp8"), ("fp8_ds_mla", "auto")]


class Run(NamedTuple):
    """A command, the fields that tell its rows apart, and their values in order."""

    command: str
    fields: str
    cases: list[tuple[Any, ...]]


RUNS = [
    Run(
        "decode --heads 3 --batch 3 --context 70 --query-len 1,2 --kv-cache-dtype fp8_ds_mla,fp8,bf16",
        "query_len kv_cache_dtype decode_query_dtype",
        [(1, *pair) for pair in QUANTIZED[:1]]
        + [(2, *pair) for pair in QUANTIZED[:1]]
        + [(query_len, *pair) for query_len in (1, 2) for pair in QUANTIZED[1:3]]
        + [(query_len, *pair) for query_len in (1, 2) for pair in QUANTIZED[3:]],
    ),
    Run(
        "prefill --heads 2 --tokens 33,8 --context 20,50 --topk 20",
        "tokens context causal topk",
        [
            *((33, 0, True, None), (33, 0, True, 20), (33, 20, False, None), (33, 50, False, None)),
            *((33, 50, False, 20), (8, 0, True, None), (8, 20, False, None), (8, 50, False, None), (8, 50, False, 20)),
        ],
    ),
    Run(
        f"{SPARSE} --batch 2 -dcp 2,1 --heads 3",
        "operation dcp kv_cache_dtype index_cache_dtype exchange",
        [
            (operation, dcp, *row)
            for dcp, exchange in ((1, "none"), (2, "made up"))
            for operation, row in (
                *(("attention", (name, None, None)) for name in ("bf16", "fp8_ds_mla")),
                *(("selection", (None, name, exchange)) for name in ("auto", "fp8")),
            )
        ],
    ),
    Run(
        f"{SPARSE} --batch 2 -dcp 1 --heads 3 --shared-keys 16,40",
        "operation topk kv_cache_dtype",
        [("shared_attention", topk, name) for topk in (16, 40) for name in ("bf16", "fp8_ds_mla")],
    ),
    Run(
        "output --heads 2 --tokens 1,3",
        "tokens quantization",
        [(num, name) for num in (1, 3) for name in ("fp8", "fp8 / 128", "fp8 / 128 ue8m0", "fp8 / 64", "nvfp4")],
    ),
    Run(
        f"{EXPERTS} --tokens 1,5",
        "geometry weights tokens",
        [
            (*pair, num)
            for pair in (
                *(("v3-tp4", weights) for weights in ("bf16", "fp8", "nvfp4", "int4_128", "awq")),
                *(("v4-flash", weights) for weights in ("fp8", "fp4")),
            )
            for num in (1, 5)
        ],
    ),
    Run(
        f"{LINEARS} --tokens 1,5",
        "weights tokens kernel",
        [
            (weights, num, kernel)
            for weights in ("bf16", "fp8", "fp4", "nvfp4", "int4", "int4_128", "awq")
            for num in (1, 5)
            for kernel in ("torch", "dcpmla")
        ],
    ),
    Run("reduce --tokens 1,3 --row-width 64", "exchange tokens tp", [("collective", 1, 1), ("collective", 3, 1)]),
    Run(
        f"{TURNS} --tokens 3,20 --context 32 --batch 2",
        "query_len decodes route",
        [(num, decodes, route) for num in (3, 20) for decodes in (0, 1) for route in ("mha", "absorbed")],
    ),
    Run(
        f"{LAYER} --batch 2 --context 70 --kv-cache-dtype fp8_ds_mla,fp8,bf16",  # the tiny latent has no 128 columns
        "kv_cache_dtype decode_query_dtype part",
        [(*pair, part) for pair in QUANTIZED[:3] for part in PARTS],
    ),
    pytest.param(
        Run(
            "layer --geometry tiny-v4 --num-layers 2 --batch 1 --context 300 --kv-cache-dtype bf16,fp8,fp8_ds_mla "
            "--index-cache-dtype fp8",  # shared keys have no format fp8, and one kind of layers alone has index keys
            "layer_kind kv_cache_dtype index_cache_dtype part",
            [
                (kind, name, index, part)
                for kind, index in (("window", "auto"), ("csa", "fp8"), ("hca", "auto"))
                for name in ("bf16", "fp8_ds_mla")
                for part in (PARTS if kind != "csa" else ("total", "projections", "selection", "attention", "output"))
            ],
        ),
        marks=pytest.mark.thorough,
    ),
]


def kind_of(command: str) -> type[Benchmark[Any, Any]]:
    """Return the benchmark of a command."""
    name = command.partition(" ")[0]
    kind: type[Benchmark[Any, Any]] = pkgutil.resolve_name(f"dcpmla.bench.{name}:{BENCHMARKS[name][0]}")
    return kind


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(timing.ROTATED_BYTES, "cpu", 1 << 16)
    monkeypatch.setitem(SHAPES, "v3-tp4", Shape(256, 128, 6, 2, 1))
    monkeypatch.setitem(SHAPES, "v4-flash", Shape(256, 128, 4, 2, 0))
    monkeypatch.setitem(linears.SHAPES, "v3-o-tp4", (192, 256))


def check_counts(kind: str, row: dict[str, Any]) -> None:
    """Compare the operations and bytes of a row with pairs that are seen, and with experts that are hit."""
    if kind == "prefill":
        num_pairs = row["tokens"] * (row["context"] or (row["tokens"] + 1) / 2)
        assert row["tflops"] == pytest.approx(2 * 2 * 320 * num_pairs / row["median_us"] / 1e6, abs=2e-3)
    if kind == "experts":
        num_values = row["tokens"] * (row["top_k"] + row["num_shared"]) * 3 * 256 * 128
        assert row["tflops"] == pytest.approx(2 * num_values / row["median_us"] / 1e6, abs=6e-4)
        if row["tokens"] == 1:
            packed = {"fp4": 0.53125, "nvfp4": 0.5625 + 4 / 7168, "int4_128": 0.515625, "awq": 0.5234375}
            assert row["bytes_read"] == int(num_values * ({"bf16": 2, "fp8": 1} | packed)[row["weights"]])
        assert row["router_us"] > 0
    if kind == "linears":
        assert row["tflops"] == pytest.approx(2 * row["tokens"] * 192 * 256 / row["median_us"] / 1e6, abs=6e-4)
        assert row["bytes_read"] < 192 * 256 * (4.1 if row["kernel"] == "torch" else 2.1)
        assert ("speedup_over_torch" in row) == (row["kernel"] == "dcpmla")
    if row.get("operation") == "selection":  # of keys of 128 numbers, or of as many bytes and a scale
        assert row["index_bytes"] == 2 * 70 // row["dcp"] * (512 if row["index_cache_dtype"] == "auto" else 132)
        assert row["index_gb_per_s"] == pytest.approx(row["index_bytes"] / row["index_scores_us"] / 1e3, abs=0.06)
        assert row.keys() >= {"local_candidates_us", "choose_tokens_us"}
        assert "gather_candidates_us" not in row  # nothing moves
        assert ("speedup_over_dcp_1" in row) == (row["dcp"] > 1)


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.command.partition(" --batch")[0])
def test_right_rows(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kind, plot = kind_of(run.command), tmp_path / "bench.png"
    rows = measure(tmp_path, run.command + (f" --plot {plot}" if kind.plot_help else ""))
    assert [tuple(row.get(field) for field in run.fields.split()) for row in rows] == run.cases
    assert not unknown_fields(rows)
    for row in rows:
        assert (row["dtype"], row["in_graph"]) == ("float32", False)
        assert row["median_us"] > 0
        assert not kind.wrong(row)
        assert row.get("error", 0.0) < 1e-5
        assert row.get("lse_error", 0.0) < 1e-4
        check_counts(run.command.partition(" ")[0], row)
        if "floor_us" in row:
            assert row["floor_share"] == pytest.approx(row["floor_us"] / row["median_us"], rel=0.1, abs=1e-3)
    printed = capsys.readouterr().out
    assert "WRONG" not in printed
    assert printed.count("median_us ") >= len(rows)
    assert not kind.plot_help or plot.read_bytes().startswith(b"\x89PNG")


def scaled(result: Any) -> Any:
    """Return a kernel's result, its rows 10 % too long."""
    return (result[0] * 1.1, *result[1:]) if isinstance(result, tuple) else result * 1.1


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize(
    ("command", "place", "change", "field", "num_wrong"),
    [
        ("decode --heads 3 --batch 3 --context 70 --query-len 1", "peers:mla_decode", scaled, "error", 1),
        ("decode --heads 3 --batch 3 --context 70", "peers:mla_decode", lambda r: (r[0], r[1] + 0.3), "lse_error", 3),
        ("decode --heads 3 --batch 3 --context 70", "peers:mla_decode", lambda r: (r[0] * torch.nan, r[1]), "error", 3),
        (PREFILL, "prefill:PrefillInputs.run", scaled, "error", 2),
        (PREFILL, "prefill:PrefillInputs.run", lambda r: (r[0] * torch.nan, r[1]), "error", 2),
        (PREFILL, "prefill:PrefillInputs.run", lambda r: (r[0], r[1] / 0.6931), "lse_error", 2),
        (f"{PREFILL} --topk 20", "prefill:PrefillInputs.call", lambda call: call._replace(mask=None), "error", 2),
        (f"{SPARSE} --batch 2 -dcp 1 --heads 3", "sparse:SelectionInputs.score", torch.neg, "different", 2),
        ("output --heads 2 --tokens 3", "output:OutputInputs.fused", lambda r: r.view(torch.uint8) ^ 1, "different", 5),
        (f"{EXPERTS} --tokens 5", "experts:ExpertsInputs.ours", scaled, "error", 7),
        (f"{LINEARS} --tokens 5", "linears:LinearInputs.ours", scaled, "error", 7),
        ("reduce --tokens 3 --row-width 64", "exchange_inputs:AddNorm.run", scaled, "error", 1),
    ],
)
def test_wrong_results_are_found(
    command: str,
    place: str,
    change: Callable[[Any], Any],
    field: str,
    num_wrong: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    right = pkgutil.resolve_name(f"dcpmla.bench.{place}")
    monkeypatch.setattr(f"dcpmla.bench.{place.replace(':', '.')}", lambda *given: change(right(*given)))
    wrong = [row for row in measure(tmp_path, command, code=1) if kind_of(command).wrong(row)]
    assert len(wrong) == capsys.readouterr().out.count(f"WRONG: {field} ") == num_wrong
    assert all(row[field] is None or row[field] > 0.08 for row in wrong)


def fail(call: PrefillCall) -> Any:
    raise RuntimeError("no kernel image\nand a long list")


def test_a_backend_that_fails_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = find_backend(PREFILL_BACKENDS, "torch")
    monkeypatch.setattr("dcpmla.bench.prefill.PREFILL_BACKENDS", (right, replace(right, name="failing", run=fail)))
    assert [row["kernel"] for row in measure(tmp_path, PREFILL)] == ["torch", "torch"]
    assert "left out: failing of heads 2, tokens 33, context 50: no kernel image\n" in capsys.readouterr().out


@pytest.mark.alone
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("command", "num_rows"),
    [
        (
            f"decode --heads 16,128 --batch 1,8 --context 1000,4096 --query-len 1,3 --kv-cache-dtype {CACHES}",
            16 * len(QUANTIZED),
        ),
        ("prefill --tokens 256,2048 --context 4096 --topk 1000", None),
        # fp8 with both kinds of queries: four layouts
        (
            f"layer --geometry v2-lite --num-layers 2 --batch 1,8 --context 1024,8192 --kv-cache-dtype {CACHES}",
            4 * len(QUANTIZED) * len(PARTS),
        ),
    ],
)
def test_one_gpu_in_graphs(command: str, num_rows: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # GPUs may be seen again
    content = measure_on_gpus(tmp_path, command, 1)
    ceilings, rows = content.get("ceilings"), content["rows"]
    kernels = [row.get("kernel") for row in rows]
    assert len(rows) == num_rows or [kernels.count(name) for name in ("triton", "torch")] == [7, 7]
    for row in rows if "layer" not in command else ():
        # Of fp8 products, probabilities are rounded to e4m3, and sums keep fewer bits.
        limit = 0.03 if row.get("decode_query_dtype") == "fp8" else 0.01
        assert row["error"] < limit
        assert row["lse_error"] < limit
        assert 0 < row.get("floor_share", 1.0) < 1.2
    if ceilings is not None:
        assert 200e12 < ceilings["flops_per_second"] < 1100e12
        assert 1.5 < ceilings["fp8_flops_per_second"] / ceilings["flops_per_second"] < 2.5
        assert 1e12 < ceilings["bytes_per_second"] < 6e12


@pytest.mark.alone
@pytest.mark.gpu
@pytest.mark.parametrize(
    "command", [f"{LINEARS} --tokens 1,20,50,128,300", "experts --shape v3-tp4 --tokens 1,8,64,1024"]
)
def test_products_of_published_sizes_are_right(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In all formats, and by each kernel that takes some number of rows: the command would exit with 1."""
    monkeypatch.undo()  # GPUs may be seen again
    formats = {row["weights"] for row in measure_on_gpus(tmp_path, command, 1)["rows"]}
    assert formats >= {"bf16", "fp8", "nvfp4", "int4_128", "awq"}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("decode --kernels dcpmla,flash", "'flash' is not a kernel; choose from dcpmla"),
        ("decode --kernels fa3", "--kernels has fa3, which is loaded from --peers; give --peers DIR"),
        (
            "decode --kernels flashmla-fp8 --peers .",
            "--kernels has flashmla-fp8, which reads what --kv-cache-dtype fp8",
        ),
        ("decode --kv-cache-dtype fp8,int8", "'int8' is not a cache format; choose from bf16, fp8, fp8_ds_mla"),
        ("decode --decode-query-dtype e5m2", "'e5m2' is not a dtype of queries; choose from auto, fp8"),
        ("decode --peers /nowhere", "--peers is /nowhere, which has no peers.py"),
        ("decode --query-len 4 --context 3", "--query-len has 4 and --context 3"),
        ("decode --json /nowhere/out.json", "--json is /nowhere/out.json"),
        ("decode --plot /nowhere/out.png", "--plot is /nowhere/out.png"),
        ("decode --dtype int8", "invalid choice: 'int8'"),
        ("prefill --tokens 0", "--tokens: '0' is not a whole number"),
        ("prefill --context 8,", "--context: '' is not a whole number"),
        ("prefill --heads x", "--heads: 'x' is not a whole number"),
        (f"{SPARSE} --context 70,16", "--context has 16 and --topk is 16; there must be more tokens than are selected"),
        (f"{SPARSE} --shared-keys 40,70", "--context has 70 and --shared-keys is 70; there must be more tokens"),
        (f"{SPARSE} --shared-keys 16 --kv-cache-dtype fp8", "--kv-cache-dtype has fp8, which shared keys do not"),
        (f"{SPARSE} -dcp 1,71", "--context has 70 and -dcp 71; each rank must have a token"),
        (f"{SPARSE} -tp 2", "tensor_parallel_size (-tp) is 2, but 1 ranks were started"),
        (f"{SPARSE} --index-cache-dtype bf16", "'bf16' is not an index cache's format; choose from auto, fp8"),
        ("experts --shape v5", "argument --shape: 'v5' is not a shape; choose from v3-tp4-64, v3-tp4, v2-lite"),
        ("experts --peers nowhere", "--peers is nowhere, which is not a directory"),
        ("exchange", "bench exchange measures 2 ranks or more, but 1 was started"),
        ("exchange --dcp-comm-backend a2a,mpi", "'mpi' is not an exchange; choose from auto, ag_rs, a2a"),
        (f"{TURNS} -dcp 2", "decode_context_parallel_size (-dcp) is 2; it must divide the number of ranks, 1"),
        ("turns --geometry tiny-v4", "geometry (--geometry) is tiny-v4; its layers must be MLA"),
        (f"{LAYER} -dcp 3", "decode_context_parallel_size (-dcp) is 3; it must divide tensor_parallel_size (-tp) 1"),
        (f"{LAYER} --variants ,bf8", "'bf8' is not a variant; choose from an empty name, pbm, q_replicate, fp8"),
        (
            f"{LAYER} --dcp-comm-backend a2a --variants fp8",
            "--variants has 'fp8', but --dcp-comm-backend is a2a; direct alone",
        ),
        (
            "layer --geometry deepseek-v9",
            "--geometry is deepseek-v9: no such file or directory; give one, or one of deepseek-v3, ",
        ),
    ],
)
def test_mistakes_are_one_line(command: str, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    refuse(command, message, capfd)


GENERATE = "generate --batch 1,3 --input-len 9 --output-len 6 --block-size 8 --model"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("--batch 2,0", "argument --batch: '0' is not a whole number of at least 1"),
        ("--seed=-1", "argument --seed: '-1' is not a whole number in [0, 2^32)"),
        ("--output-len 1", "--output-len is 1; it must be at least 2"),
        (
            "--input-len 251",
            "--input-len 251 and --output-len 6, together 257 tokens; with --max-model-len 256",
        ),
        (
            "--max-num-seqs 2",
            "--batch has 3; raise --max-num-seqs and --max-num-batched-tokens, which allow 2",
        ),
        (
            f"--kv-cache-memory-bytes {8 * 8 * 192}",
            "cache: 3 requests need 9 blocks, but there is room for 8",
        ),
        (
            "--output-len 2 --max-num-batched-tokens 9",
            "--output-len is 2: with a batch of 3 the first requests",
        ),
        ("--step-tokens 9,65 --max-num-batched-tokens 64", "--step-tokens has 65; raise --max-num-batched-"),
        ("--context 30,400", "--context has 400; --max-model-len, by default the model's, allows 256"),
    ],
)
def test_mistakes_with_a_model(changes: str, message: str, model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *GENERATE.split(), str(model), "--device", "cpu", *changes.split()]) == 2
    assert f"dcpmla: error: {message}" in capfd.readouterr().err
