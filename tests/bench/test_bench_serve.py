"""`dcpmla bench serve`: the load is as requested, the same under every cut; the rows report its outcome."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpmla.__main__ import main
from dcpmla.bench.http_load import Answer, describe_lost
from dcpmla.bench.load import make_load, served_row, summarize
from dcpmla.cache.latent import LatentPlan
from dcpmla.config import DCPConfig
from dcpmla.runtime.request import Request
from dcpmla.runtime.sampling import SamplingParams
from dcpmla.runtime.stats import Stats
from tests.support.launchers import free_port, run_forked, unattended
from tests.support.models import VOCAB_SIZE, save_tiny
from tests.support.ranks import run_ranks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_tiny("deepseek_v3", directory)
    # Whatever comes ends a request, unless end-of-sequence tokens are ignored.
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(VOCAB_SIZE))}))
    return directory


pytestmark = pytest.mark.usefixtures("one_process_on_cpu")


def options(model: Path, **changes: object) -> list[str]:
    """Of a small load; a change to None leaves an option out."""
    values: dict[str, object] = {
        "model": model,
        "device": "cpu",
        "num_requests": 12,
        "input_lens": "16,60",
        "output_lens": "4,20",
        "block_size": 8,
        "kv_cache_memory_bytes": 100_000,
    }
    values |= changes
    return [
        str(item)
        for name, value in values.items()
        if value is not None
        for item in (f"--{name.replace('_', '-')}", value)
    ]


def serve(model: Path, **changes: object) -> int:
    return main(["bench", "serve", *options(model, **changes)])


@given(rate=st.sampled_from([0.1, 3.0, 1e4]), seed=st.integers(0, 1 << 40))
@settings(max_examples=20, deadline=None)
def test_arrivals_are_poisson(rate: float, seed: int) -> None:
    """The n-th arrival is a sum of n exponential gaps: mean n / rate, standard deviation sqrt(n) / rate.

    5.5 of those: once in 10^7.
    """
    num = 4000
    gaps = np.diff(make_load(num, rate, [1], [1], VOCAB_SIZE, seed).arrival_times, prepend=0.0) * rate
    assert abs(gaps.sum() - num) < 5.5 * math.sqrt(num)
    for length in (0.5, 1.0, 2.0):  # P(gap > x) = exp(-x)
        share = math.exp(-length)
        assert abs((gaps > length).mean() - share) < 5.5 * math.sqrt(share * (1 - share) / num)
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < 5.5 / math.sqrt(num)


def test_all_at_once() -> None:
    assert make_load(5, math.inf, [1], [1], VOCAB_SIZE, 0).arrival_times == 5 * [0.0]


@given(input_lens=st.lists(st.integers(1, 9), min_size=1, max_size=3, unique=True), seed=st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_lengths_are_drawn_evenly_from_the_lists(input_lens: list[int], seed: int) -> None:
    num, output_lens, vocab_size = 900, [2, 50], 20  # prompts of one token, too, draw every id
    load = make_load(num, 1.0, input_lens, output_lens, vocab_size, seed)
    drawn = [len(prompt) for prompt in load.prompts]
    assert set(drawn) == set(input_lens)
    assert set(load.output_lens) == set(output_lens)
    for values, allowed in ((drawn, input_lens), (load.output_lens, output_lens)):
        share = 1 / len(allowed)
        assert all(
            abs(values.count(length) - num * share) < 6 * math.sqrt(num * share * (1 - share)) + 1 for length in allowed
        )
    both = sum(length == input_lens[0] and output == 2 for length, output in zip(drawn, load.output_lens, strict=True))
    assert abs(both - drawn.count(input_lens[0]) / 2) < 6 * math.sqrt(num / 4)  # drawn independently
    tokens = {token for prompt in load.prompts for token in prompt}
    assert tokens == set(range(vocab_size))


def test_a_load_depends_on_its_arguments_alone() -> None:
    arguments = (40, 3.0, [5, 9], [2, 4], VOCAB_SIZE)
    first, second = run_ranks(2, make_load, *arguments, 7)
    assert first == second == make_load(*arguments, 7)
    assert make_load(*arguments, 8) != first
    faster, longer = make_load(40, 6.0, *arguments[2:], 7), make_load(60, *arguments[1:], 7)
    assert (faster.prompts, faster.output_lens) == (first.prompts, first.output_lens)
    np.testing.assert_allclose(np.array(faster.arrival_times) * 2, first.arrival_times)
    assert (longer.prompts[:40], longer.output_lens[:40], longer.arrival_times[:40]) == (
        first.prompts,
        first.output_lens,
        first.arrival_times,
    )


def test_summaries() -> None:
    assert summarize([*range(101)]) == {"mean": 50, "p50": 50, "p90": 90, "p99": 99}
    assert summarize([3.0]) == {"mean": 3, "p50": 3, "p90": 3, "p99": 3}
    assert summarize([]) == {"mean": None, "p50": None, "p90": None, "p99": None}


def test_rows_by_hand() -> None:
    """Two requests, on a clock that showed 0 when the load began."""
    params = SamplingParams(max_new_tokens=3)
    early = Request([1, 2, 3, 4], params, arrival_time=1.0, scheduled_time=1.5, first_token_time=3.0, finish_time=7.0)
    late = Request([1, 2], params, arrival_time=4.0, scheduled_time=6.0, first_token_time=7.0, finish_time=8.0)
    for request in (early, late):
        request.token_ids = [7, 8, 9]
    plan = LatentPlan(num_layers=1, num_blocks=11, block_size=1, row_width=2, dtype=torch.float32, dcp_size=2)
    stats = Stats(max_num_running=2, num_preemptions=5, num_cached_tokens=6)
    engine: Any = SimpleNamespace(
        cache=SimpleNamespace(sizes=plan),
        dcp=DCPConfig(tensor_parallel_size=2, decode_context_parallel_size=2, block_size=1),
        stats=stats,
    )
    expected = {
        "kv_cache_bytes_per_rank": 88,
        "kv_tokens_total": 22,
        "num_fit_mean": 4,
        "num_fit_largest": 3,
    }  # 3 and 2 blocks of 2
    expected |= {"max_num_running": 2, "num_preemptions": 5, "num_cached_tokens": 6}
    expected |= {"queue_seconds_mean": 1.25, "time_to_first_token_mean": 2.5, "time_per_token_mean": 1.25}
    expected |= {"end_to_end_seconds_mean": 5.0, "queue_seconds_p50": 1.25}
    row = served_row(engine, [early, late])
    assert {name: row[name] for name in expected} == expected
    rates = ("seconds", "requests_per_second", "input_tokens_per_second", "output_tokens_per_second")
    assert [row[name] for name in rates] == [8.0, 0.25, 0.8, 0.8]  # 0.75 to one digit
    assert len(row) == 7 + len(rates) + 4 * 4


def check_row(row: dict[str, Any], seed: int = 0) -> None:
    """Check what must hold for any run of the small load."""
    rate = math.inf if row["request_rate"] == "inf" else row["request_rate"]
    load = make_load(row["num_requests"], rate, row["input_lens"], row["output_lens"], VOCAB_SIZE, seed)
    assert row["seconds"] > load.arrival_times[-1]
    assert row["requests_per_second"] * row["seconds"] == pytest.approx(row["num_requests"], rel=1e-2)
    assert row["input_tokens_per_second"] * row["seconds"] == pytest.approx(sum(map(len, load.prompts)), rel=1e-2)
    assert row["output_tokens_per_second"] * row["seconds"] == pytest.approx(sum(load.output_lens), rel=1e-2)
    kinds = ("queue_seconds", "time_to_first_token", "time_per_token", "end_to_end_seconds")
    for kind in kinds:
        assert 0 <= row[f"{kind}_p50"] <= row[f"{kind}_p90"] <= row[f"{kind}_p99"] <= row["seconds"]
        assert 0 < row[f"{kind}_mean"] <= row["seconds"]
    for name in ("mean", "p50"):  # a request waits for its first step, then has its first token, then its last
        queue, first, _, end = (row[f"{kind}_{name}"] for kind in kinds)
        assert queue < first < end
    assert row["num_fit_largest"] <= row["num_fit_mean"]
    blocks = row["kv_tokens_total"] // (row["block_size"] * row["dcp"])
    needs = [
        -(-(len(p) + n - 1) // (row["block_size"] * row["dcp"]))
        for p, n in zip(load.prompts, load.output_lens, strict=True)
    ]
    assert (row["num_fit_mean"], row["num_fit_largest"]) == (int(blocks / np.mean(needs)), blocks // max(needs))


def test_one_process(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plot = tmp_path / "out.json", tmp_path / "out.png"
    out.write_text("old")
    assert serve(model, request_rate=8, seed=3, json=out, plot=plot, commit="abc") == 0
    content = json.loads(out.read_text())
    assert (content["commit"], content["machine"]) == ("abc", "1 x CPU")
    (row,) = content["rows"]
    check_row(row, seed=3)
    expected = {
        "tp": 1,
        "dcp": 1,
        "exchange": "none",
        "request_rate": 8.0,
        "num_requests": 12,
        "input_lens": [16, 60],
    }
    expected |= {"output_lens": [4, 20], "seed": 3, "dtype": "float32", "model": model.name, "num_cached_tokens": 0}
    expected |= {"kv_cache_dtype": "float32", "decode_query_dtype": "auto"}
    assert {name: row[name] for name in expected} == expected
    token_bytes = 2 * (16 + 8) * 4  # layers, latent and rope widths, float32
    assert row["kv_tokens_total"] == 100_000 // (8 * token_bytes) * 8
    assert row["kv_cache_bytes_per_rank"] == row["kv_tokens_total"] * token_bytes
    assert plot.read_bytes().startswith(b"\x89PNG\r\n")
    assert plot.read_bytes().endswith(b"IEND\xaeB`\x82")
    assert sorted(tmp_path.iterdir()) == [out, plot]  # nothing half-written beside them
    printed = capsys.readouterr()
    table = dict(
        line.split(maxsplit=1) for line in printed.out.splitlines() if line.count(" ") and line.split()[0] in row
    )
    assert list(table) == list(row)
    assert table["input_lens"] == "16,60"
    assert "dcp 1, load: 100%" in printed.err


def test_lost_requests_are_described_in_a_line() -> None:
    assert describe_lost([Answer(0.0), Answer(1.0)]) == ""
    errors = [*["status 429: {\n  busy\n}"] * 3, "a", "b", "b", "c"]
    answers = [Answer(0.0, error=error) for error in errors] + [Answer(0.0)]
    assert describe_lost(answers) == "7 of 8 are lost: 3 x status 429: { busy }; 2 x b; 1 x a"


def test_a_server_that_is_not_there(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    url = f"http://localhost:{free_port()}"
    assert serve(model, url=url, json=tmp_path / "out.json") == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "error" in line]
    assert f"url (--url) is '{url}'; the server must answer all requests, but 12 of 12 are lost: " in line
    assert not list(tmp_path.iterdir())


def test_warm_up_does_not_count(model: Path, tmp_path: Path) -> None:
    """Its eight requests run together; the load's only one runs alone, and has no time per token."""
    out = tmp_path / "out.json"
    assert serve(model, num_requests=1, output_lens="1", json=out) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["max_num_running"], row["num_requests"], row["request_rate"]) == (1, 1, "inf")
    assert row["time_per_token_mean"] is None
    assert row["output_tokens_per_second"] * row["seconds"] == pytest.approx(1, rel=1e-1)


def test_the_same_bytes_hold_more_requests_with_dcp(model: Path, tmp_path: Path) -> None:
    """Memory is looked at once: the bytes that the first size gets are what the second gets, and the first is gone by
    then.
    """
    script, out = tmp_path / "script.py", tmp_path / "out.json"
    script.write_text(f"""
import sys, weakref
from dcpmla.__main__ import main
from dcpmla.bench import serve as bench_serve
from dcpmla.integrations import loading as engine

memory = iter([{26 * 8 * 192 + 5}])
engine.free_bytes = lambda *_: next(memory)
build_engine, built = bench_serve.build_engine, []

def build_alone(*arguments):
    assert not any(reference() for reference in built)
    engine, selection = build_engine(*arguments)
    built.extend([weakref.ref(engine.cache.layers[0]), weakref.ref(engine.model.head.linear.weight)])
    return engine, selection

bench_serve.build_engine = build_alone
sys.exit(main())
""")
    changes = {"kv_cache_memory_bytes": None, "json": out, "num_requests": 16}
    arguments = [script, "bench", "serve", "-tp", 2, "-dcp", "1,2,1", *options(model, **changes)]
    run, silent = run_forked(unattended(arguments, 2))
    tp, dcp = json.loads(out.read_text())["rows"]  # a size given twice is measured once
    for row in (tp, dcp):
        check_row(row)
    assert (tp["dcp"], dcp["dcp"], tp["tp"], dcp["tp"]) == (1, 2, 2, 2)
    assert tp["kv_cache_bytes_per_rank"] == dcp["kv_cache_bytes_per_rank"] == 26 * 8 * 192
    assert (tp["kv_tokens_total"], dcp["kv_tokens_total"]) == (26 * 8, 2 * 26 * 8)
    for name in ("num_fit_mean", "num_fit_largest", "max_num_running"):
        assert dcp[name] >= 1.5 * tp[name], name
    assert tp["num_fit_largest"] <= tp["max_num_running"] < tp["num_requests"]
    assert tp["num_preemptions"] > 0
    assert run.stdout.count("kv_tokens_total") == 1
    assert "kv_tokens_total" not in silent.stdout  # one rank reports


def test_no_size_is_served_in_vain(model: Path, tmp_path: Path) -> None:
    """A request that fits under DCP 2 only ends the command before the load: one line, the same end on both ranks,
    nothing written.
    """
    out = tmp_path / "out.json"
    changes = {"kv_cache_memory_bytes": 6 * 8 * 192, "json": out}
    arguments = ["-m", "dcpmla", "bench", "serve", "-tp", 2, "-dcp", "2,1", *options(model, **changes)]
    ends = run_forked(unattended(arguments, 2), check=False)
    said = "".join(end.stderr for end in ends)
    message = "cache: the longest request has 79 tokens, but 9,216 bytes a rank hold 48 with -dcp 1; raise --kv-cache"
    assert said.count("dcpmla: error: ") == said.count(message) == 1
    assert [end.returncode for end in ends] == [2, 2]
    assert "load: " not in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"request_rate": 0}, "argument --request-rate: '0' is not a number of requests a second above 0"),
        ({"request_rate": "-1"}, "argument --request-rate: '-1' is not a number"),
        ({"request_rate": "nan"}, "argument --request-rate: 'nan' is not a number"),
        ({"request_rate": "fast"}, "argument --request-rate: 'fast' is not a number"),
        ({"num_requests": 0}, "argument --num-requests: '0' is not a whole number of at least 1"),
        ({"input_lens": ""}, "argument --input-lens: '' is not a whole number of at least 1"),
        ({"output_lens": "3,0"}, "argument --output-lens: '0' is not a whole number of at least 1"),
        ({"seed": "-1"}, "argument --seed: '-1' is not a whole number in [0, 2^32)"),
        (
            {"decode_context_parallel_size": "1,2"},
            "decode_context_parallel_size (-dcp) is 2; it must divide tensor_parallel_size (-tp) 1: choose 1",
        ),
        (
            {"decode_context_parallel_size": "1,"},
            "argument -dcp/--decode-context-parallel-size: '' is not a whole number",
        ),
        (
            {"max_model_len": 79},
            "--input-lens 60 and --output-lens 20, together 80 tokens; with --max-model-len 79",
        ),
        (
            {"kv_cache_memory_bytes": 9 * 8 * 192},
            "cache: the longest request has 79 tokens, but 13,824 bytes a rank hold 72 with -dcp 1",
        ),
        ({"json": "/no/such/dir/out.json"}, "--json is /no/such/dir/out.json, where no file can be written"),
        ({"plot": "out.docx"}, "--plot is out.docx; its ending must be one of"),
    ],
)
def test_mistakes(
    changes: dict[str, object],
    message: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert serve(model, **changes) == 2
    error = capfd.readouterr().err
    assert f"dcpmla: error: {message}" in error
    assert "load: " not in error  # found before anything is served
    assert not list(tmp_path.iterdir())
