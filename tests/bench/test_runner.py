"""The runner of benchmarks: times, time limits, cases that do not fit, result files and their vocabulary."""

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dcpmla.bench import runner
from dcpmla.bench.peers import load_adapters
from dcpmla.bench.results import FIELDS, unknown_fields, write_results
from dcpmla.bench.runner import Benchmark, Kept
from dcpmla.bench.timing import TimeLimit, time_operation
from dcpmla.job.watchdog import Reported
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").rglob("*.json"))


# ---- running cases


class Counting(Benchmark[int, list[int]]):
    """Case n has n inputs; 2 does not fit, 3 has no memory."""

    def cases(self) -> Iterator[int]:
        yield from self.args.cases

    def inputs(self, case: int) -> list[int]:
        if case == 2:
            raise ValueError("2 is too large")
        if case == 3:
            raise MemoryError("out of memory\nand where")
        return list(range(case))

    def measure(self, case: int, inputs: list[int]) -> list[dict[str, Any]]:
        return [{"tokens": case, "median_us": float(len(inputs))}]

    def summary(self, rows: Sequence[dict[str, Any]]) -> Iterator[str]:
        yield f"{len(rows)} rows"


def parse(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    runner.add_arguments(Counting, parser)
    return parser.parse_args(["--device", "cpu", *options])


@pytest.mark.usefixtures("one_process_on_cpu")
def test_cases_that_do_not_fit_are_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = parse("--json", str(tmp_path / "out.json"), "--commit", "abc")
    args.cases = [1, 2, 3, 4]
    args.run(args)
    assert json.loads((tmp_path / "out.json").read_text())["rows"] == [
        {"tokens": 1, "median_us": 1.0},
        {"tokens": 4, "median_us": 4.0},
    ]
    lines = capsys.readouterr().out.splitlines()
    skipped = ["skipped: 2: 2 is too large", "skipped: 3: out of memory"]
    assert lines[1:] == ["1: median_us 1", *skipped, "4: median_us 4", "2 rows"]


@pytest.mark.usefixtures("one_process_on_cpu")
def test_an_engine_that_does_not_fit_is_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    args = parse()
    args.cases, args.model, args.revision = [1, 2], str(tmp_path), None
    monkeypatch.setattr(Counting, "has_engine", True)
    monkeypatch.setattr(Counting, "measure", lambda counting, case, _: [{"tokens": len(counting.inputs(case))}])
    with pytest.raises(Reported):
        args.run(args)
    assert "error: 2 is too large" in capfd.readouterr().err


@pytest.mark.usefixtures("one_process_on_cpu")
def test_no_case_begins_after_the_time_limit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = parse("--time-limit", "1")
    args.cases = [1, 4]
    measure = Counting.measure
    monkeypatch.setattr(Counting, "measure", lambda *case: (time.sleep(1.1), measure(*case))[1])
    args.run(args)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == ["1: median_us 1", "time is over (--time-limit): 4 and what follows is left out", "1 rows"]


def test_neighbours_share_what_was_kept() -> None:
    kept = Kept()
    first = kept.get(1, lambda: [1])
    assert kept.get(1, lambda: [2]) is first
    assert kept.get(2, lambda: [2]) == [2]
    assert kept.get(1, lambda: [3]) == [3]


def test_errors_are_wrong_beyond_their_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counting, "limits", staticmethod(lambda _: {"error": 0.02, "lse_error": 0.03}))
    for error, is_wrong in ((None, True), (float("nan"), True), (0.03, True), (0.02, False), (0.0, False)):
        found = [Counting.wrong({"error": error, "lse_error": lse_error}) for lse_error in (0.03, 0.04)]
        assert found == [["error"] * is_wrong, ["error"] * is_wrong + ["lse_error"]]


# ---- times


def times_of_ranks() -> tuple[float, bool, bool, int]:
    """Return the time of what is slow on rank 1; whether time is over where it is on rank 1 alone, and nowhere; the
    calls that little time leaves.
    """
    rank, calls, cpu = torch.distributed.get_rank(), [], torch.device("cpu")
    slow = time_operation(lambda _: time.sleep(0.02 * rank), cpu, calls=5)
    time_operation(calls.append, cpu, calls=1, seconds=0.0)
    return slow.median_us, TimeLimit(1000 * (1 - rank), cpu).is_over(), TimeLimit(1000, cpu).is_over(), len(calls)


def test_times_are_the_slowest_ranks() -> None:
    first, second = run_ranks(2, times_of_ranks)
    assert first == second
    assert first[0] >= 20_000
    assert first[1:] == (True, False, 3 + 1 + 5)  # warm-ups, one to see how long it takes, samples


# ---- result files


def test_results_name_their_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True
    ).stdout.strip()
    rows = [{"operation": "gather_heads", "median_us": 1.5}]
    write_results(tmp_path / "a.json", rows, 8, torch.device("cpu"))
    content = json.loads((tmp_path / "a.json").read_text())
    assert list(content) == ["commit", "machine", "versions", "rows"]
    assert (content["commit"], content["machine"], content["rows"]) == (head or "unknown", "8 x CPU", rows)
    assert content["versions"]["transformers"] == transformers.__version__
    monkeypatch.setenv("PATH", str(tmp_path))  # no git there
    write_results(tmp_path / "a.json", rows, 8, torch.device("cpu"))
    assert json.loads((tmp_path / "a.json").read_text())["commit"] == "unknown"


def test_rows_have_one_vocabulary(tmp_path: Path) -> None:
    rows = [{"batch": 1, "apart_us": 2.0, "speedup_over_others": 1.0}, {"num_tokens": 3, "median": 1.0}]
    assert unknown_fields(rows) == {"num_tokens", "median"}
    with pytest.raises(AssertionError, match="num_tokens"):
        write_results(tmp_path / "a.json", rows, 1, torch.device("cpu"))


def test_the_vocabulary_is_documented() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    _, table = page.split("| field | what |\n|---|---|\n")
    assert re.findall(r"^\| `(.+?)` \| \S", table.partition("\n\n")[0], re.MULTILINE) == FIELDS


def test_committed_results_have_the_vocabulary() -> None:
    rows = {path: json.loads(path.read_text())["rows"] for path in RESULTS}
    assert all(rows.values())
    assert {path: unknown for path, of_file in rows.items() if (unknown := unknown_fields(of_file))} == {}


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def test_committed_results_name_commits_that_exist() -> None:
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("not a git checkout, or a shallow one")
    assert RESULTS
    commits = {path: json.loads(path.read_text())["commit"] for path in RESULTS}
    assert [path for path, commit in commits.items() if git("cat-file", "-e", f"{commit}^{{commit}}").returncode] == []


def test_peers_need_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "benchmarks.peers.attention", raising=False)
    monkeypatch.delitem(sys.modules, "benchmarks.peers", raising=False)
    monkeypatch.setitem(sys.modules, "benchmarks", None)
    with pytest.raises(ValueError, match=r"^--peers needs the folder benchmarks/ of a checkout"):
        load_adapters("attention")
