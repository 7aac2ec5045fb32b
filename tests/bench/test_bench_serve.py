"""`dcpmla bench serve`: the rows report the load's outcome, and mistakes end it before the load."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from dcpmla.bench.load import make_load
from tests.support.benches import measure
from tests.support.launchers import run_forked, unattended
from tests.support.models import VOCAB_SIZE, save_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_tiny("deepseek_v3", directory)
    # Whatever comes ends a request, unless end-of-sequence tokens are ignored.
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(VOCAB_SIZE))}))
    return directory


pytestmark = pytest.mark.usefixtures("one_process_on_cpu")
LOAD = "serve --num-requests 12 --input-lens 16,60 --output-lens 4,20 --block-size 8"
TINY = f"{LOAD} --kv-cache-memory-bytes 100000"


def check_row(row: dict[str, Any], seed: int = 0) -> None:
    """Check what must hold for any run of the small load; `served_row` is tested by hand."""
    rate = math.inf if row["request_rate"] == "inf" else row["request_rate"]
    load = make_load(row["num_requests"], rate, row["input_lens"], row["output_lens"], VOCAB_SIZE, seed)
    assert row["seconds"] > load.arrival_times[-1]
    assert row["input_tokens_per_second"] * row["seconds"] == pytest.approx(sum(map(len, load.prompts)), rel=1e-2)
    assert row["output_tokens_per_second"] * row["seconds"] == pytest.approx(sum(load.output_lens), rel=1e-2)
    for name in ("mean", "p50"):  # a request waits for its first step, then has its first token, then its last
        kinds = ("queue_seconds", "time_to_first_token", "end_to_end_seconds")
        queue, first, end = (row[f"{kind}_{name}"] for kind in kinds)
        assert 0 <= queue < first < end <= row["seconds"]


def test_one_process(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bench.json"
    out.write_text("old")
    (row,) = measure(tmp_path, f"{TINY} --model {model} --request-rate 8 --seed 3")
    check_row(row, seed=3)
    expected = {"tp": 1, "dcp": 1, "exchange": "none", "request_rate": 8.0, "num_requests": 12, "input_lens": [16, 60]}
    expected |= {"output_lens": [4, 20], "seed": 3, "dtype": "float32", "model": model.name, "num_cached_tokens": 0}
    expected |= {"kv_cache_dtype": "float32", "decode_query_dtype": "auto"}
    assert {name: row[name] for name in expected} == expected
    token_bytes = 2 * (16 + 8) * 4  # layers, latent and rope widths, float32
    assert row["kv_tokens_total"] == 100_000 // (8 * token_bytes) * 8
    assert row["kv_cache_bytes_per_rank"] == row["kv_tokens_total"] * token_bytes
    assert [*tmp_path.iterdir()] == [out]  # nothing half-written beside it
    printed = capsys.readouterr()
    _, table_text = printed.out.split("\ndcp 1: ")
    table = dict(line.split(maxsplit=1) for line in table_text.splitlines()[1:])
    assert list(table) == list(row)
    assert table["input_lens"] == "16,60"
    assert "dcp 1, load: 100%" in printed.err


@pytest.mark.thorough
def test_warm_up_does_not_count(model: Path, tmp_path: Path) -> None:
    """Its eight requests run together; the load's only one runs alone, and has no time per token."""
    (row,) = measure(tmp_path, f"{TINY} --model {model} --num-requests 1 --output-lens 1")
    assert (row["max_num_running"], row["num_requests"], row["request_rate"]) == (1, 1, "inf")
    assert row["time_per_token_mean"] is None
    assert row["output_tokens_per_second"] * row["seconds"] == pytest.approx(1, rel=1e-1)


@pytest.mark.thorough
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
engine._free_bytes = lambda *_: next(memory)
build_engine, built = bench_serve.build_engine, []

def build_alone(*arguments):
    assert not any(reference() for reference in built)
    engine, selection = build_engine(*arguments)
    built.extend([weakref.ref(engine.cache[0].latents), weakref.ref(engine.model.head.linear.weight)])
    return engine, selection

bench_serve.build_engine = build_alone
sys.exit(main())
""")
    command = f"bench {LOAD} --num-requests 16 -tp 2 -dcp 1,2,1 --device cpu --model {model} --json {out}"
    run, silent = run_forked(unattended([script, *command.split()], 2))
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


@pytest.mark.thorough
def test_no_size_is_served_in_vain(model: Path, tmp_path: Path) -> None:
    """A request that fits under DCP 2 only ends the command before the load: one line, the same end on both ranks,
    nothing written.
    """
    sizes = f"-tp 2 -dcp 2,1 --kv-cache-memory-bytes {6 * 8 * 192}"
    command = f"bench {LOAD} {sizes} --device cpu --model {model} --json {tmp_path / 'out.json'}"
    arguments = ["-m", "dcpmla", *command.split()]
    ends = run_forked(unattended(arguments, 2), check=False)
    said = "".join(end.stderr for end in ends)
    message = "cache: the longest request has 79 tokens, but 9,216 bytes a rank hold 48 with -dcp 1; raise --kv-cache"
    assert said.count("dcpmla: error: ") == said.count(message) == 1
    assert [end.returncode for end in ends] == [2, 2]
    assert "load: " not in said
    assert not list(tmp_path.iterdir())
