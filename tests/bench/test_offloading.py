"""Benchmarks of a cache with slower tiers, on CPUs: they run to their ends, and write rows of the vocabulary."""

import argparse
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import conversations, returning
from dcpmla.bench.results import unknown_fields
from tests.bench.test_engines import measured

ROOT = Path(__file__).parents[2]
TINY = "--geometry tiny --layers 2 --device cpu --max-num-batched-tokens 256 --max-num-seqs 8 --commit abc"
CONVERSATIONS = "--num-conversations 5 --num-turns 3 --input-len 192 --turn-len 16 --output-len 4 --request-rate 50"
RETURNING = "--context 256 --decodes 2 --decode-context 64 --decode-len 32 --turn-len 16 --repeats 1"

pytestmark = pytest.mark.usefixtures("one_process_on_cpu")


def run(module: Any, monkeypatch: pytest.MonkeyPatch, out: Path, options: str) -> list[dict[str, Any]]:
    """Run a script in this process; return the rows that it wrote."""
    monkeypatch.setattr(sys, "argv", ["script", *f"{TINY} {options} --json {out}".split()])
    module.main()
    content = json.loads(out.read_text())
    assert (content["commit"], content["machine"]) == ("abc", "1 x CPU")
    assert not unknown_fields(content["rows"])
    rows: list[dict[str, Any]] = content["rows"]
    return rows


def test_a_conversation_returns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without tiers it is prefilled, found on the GPU, and prefilled again with decodes. These are timed alone, too."""
    rows = run(returning, monkeypatch, tmp_path / "returning.json", RETURNING)
    cases = [(row["source"], row["context"], row["decodes"], row.get("num_cached_tokens")) for row in rows]
    assert cases == [("prefill", 256, 0, 0), ("gpu", 256, 0, 256), ("prefill", 256, 2, 0), ("none", 64, 2, None)]
    assert all(row["time_to_first_token_mean"] > 0 for row in rows if row["source"] != "none")
    assert all("inter_token_mean" in row for row in rows if row["decodes"])
    # The tiny model has two layers, and all are measured: nothing is scaled.
    alone = [row for row in rows if "scaled_time_to_first_token" in row]
    assert len(alone) == 2
    assert all(row["scaled_time_to_first_token"] == row["time_to_first_token_mean"] for row in alone)


@pytest.mark.thorough
def test_a_conversation_returns_from_host_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Alone and beside decodes; the planner's rule loads so many tokens even into a tiny model."""
    options = f"{RETURNING} --context 1024 --kv-offloading-size 0.02"
    rows = run(returning, monkeypatch, tmp_path / "returning.json", options)
    cases = [(row["source"], row["decodes"], row.get("num_cached_tokens")) for row in rows]
    assert cases == [
        *(("prefill", 0, 0), ("gpu", 0, 1024), ("host", 0, 1024)),
        *(("host", 2, 1024), ("none", 2, None), ("prefill", 2, 0), ("none", 2, None)),
    ]
    assert all(row["kv_offloading_size"] == 0.02 for row in rows)
    assert rows[2]["scaled_time_to_first_token"] == rows[2]["time_to_first_token_mean"]


def test_times_are_scaled_by_the_planner() -> None:
    """DeepSeek-V3 has 61 layers, 58 with experts. In a step of few tokens, the weights of experts take longest."""
    parser = argparse.ArgumentParser()
    returning.add_engine_arguments(parser)
    args = parser.parse_args(["--layers", "4"])
    scale = returning.Scale(
        args, returning.read_model(returning.model_config(args, 1 << 20)), returning.published_model(args)
    )
    assert scale(1.0, "prefill", 32768, 64) == pytest.approx(61 / 4, rel=0.03)
    assert scale(1.0, "host", 1 << 19, 64) == pytest.approx(61 / 4, rel=0.03)
    assert 61 / 4 < scale(1.0, "gpu", 32768, 64) < 58 / 3


def test_conversations_are_served_in_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Once without tiers, then with host memory."""
    options = f"{CONVERSATIONS} --kv-offloading-size 0.01"
    row, other = run(conversations, monkeypatch, tmp_path / "conversations.json", options)
    assert "kv_offloading_size" not in row
    assert other["kv_offloading_size"] == 0.01
    assert other["num_prompt_tokens"] == row["num_prompt_tokens"]
    lengths = np.array([192, 192 + 4 + 16, 192 + 2 * (4 + 16)])
    assert row["num_prompt_tokens"] == 5 * lengths.sum()
    assert row["kv_tokens_total"] < 5 * lengths[-1]
    assert 0 <= row["num_cached_tokens"] < row["num_prompt_tokens"]
    assert row["time_to_first_token_mean"] <= row["time_to_first_token_p99"]
    assert row["output_tokens_per_second"] == pytest.approx(5 * 3 * 4 / row["seconds"], abs=0.1)


def test_turns_arrive_as_a_poisson_process() -> None:
    """All conversations together; each has all its turns, in order."""
    sizes = {"num_conversations": 50, "num_turns": 40, "input_len": 3, "turn_len": 2, "request_rate": 4.0, "seed": 0}
    load = conversations.make_conversations(argparse.Namespace(**sizes), 100)
    assert all(len(each.due) == len(each.new) == 40 and each.due == sorted(each.due) for each in load)
    assert {tuple(map(len, each.new)) for each in load} == {(3, *[2] * 39)}
    gaps = np.diff(sorted(time for each in load for time in each.due))
    assert np.mean(gaps) == pytest.approx(1 / 4, rel=0.1)
    assert np.std(gaps) == pytest.approx(1 / 4, rel=0.1)


# A kit that notes its arguments, and a row for each run of a load.
KIT = """
import json, os, sys
from pathlib import Path
out = Path(os.environ["OUT"])
with open(out / "arguments.jsonl", "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
if sys.argv[1] == "run":
    row = json.loads(Path(__file__).with_name("row.json").read_text())
    row["engine"] = sys.argv[sys.argv.index("--engine") + 1]
    row["tag"] = sys.argv[sys.argv.index("--tag") + 1]
    with open(out / "rows.jsonl", "a") as file:
        file.write(json.dumps(row) + "\\n")
"""


@pytest.mark.thorough
def test_both_engines_get_the_same_load(tmp_path: Path) -> None:
    kit, out = tmp_path / "kit", tmp_path / "out"
    kit.mkdir()
    (kit / "e2e.py").write_text(KIT)
    load = "6 conversations at 4/s, 4 turns, 4,096 + 64 / 64"
    row = measured("dcpmla", "c", **{"what": load, "limits": "8,192 tokens, 128 requests, prefix caching"})
    (kit / "row.json").write_text(json.dumps(row))
    script = ROOT / "benchmarks" / "offload_engines.sh"
    assert script.stat().st_mode & stat.S_IXUSR
    sizes = {"CONVERSATIONS": "6", "FIRST": "4096", "E2E_HOME": str(tmp_path / "home"), "PYTHON": sys.executable}
    command = ["bash", str(script), str(kit), str(out)]
    subprocess.run(command, env={**os.environ, **sizes}, check=True, capture_output=True, timeout=120)
    calls = [json.loads(line) for line in (out / "arguments.jsonl").read_text().splitlines()]
    assert {call[0] for call in calls} == {"unpack", "make", "run"}
    words = [[word for word in call[1:] if word != "--prefix-caching"] for call in calls if call[0] == "run"]
    runs = [dict(zip(each[::2], each[1::2], strict=True)) for each in words]
    assert [(each["--engine"], each["--tag"]) for each in runs] == [
        *(("vllm", "host"), ("dcpmla", "host"), ("dcpmla", ""), ("vllm", ""))
    ]
    options = [json.loads(each[f"--{each['--engine']}-json"]) for each in runs]
    num_tokens = 6 * (4096 + 3 * 64 + 4 * 64)
    assert {each["kv_cache_memory_bytes"] for each in options} == {num_tokens // 3 * 20 * 1152}
    host = {each.get("kv_offloading_size") for each in options}
    assert host == {2, None}
    assert 2**30 < 2 * num_tokens * 20 * 1152 < 2 * 2**30
    names = ("--model", "--load", "--conversations", "--turns", "--first", "--more", "--answer")
    loads = [{name: each[name] for name in names} for each in runs]
    assert loads == [loads[0]] * 4
    rows = json.loads((out / "offload_engines.json").read_text())["rows"]
    assert [(each["engine"], each.get("tag")) for each in rows] == [
        *(("vllm", "host"), ("dcpmla", "host"), ("dcpmla", None), ("vllm", None))
    ]
