"""Benchmarks in this process on its CPU, or in processes of their own on GPUs: their result files and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest

from dcpmla.__main__ import main
from tests.support.launchers import run_together, torchrun

Rows = list[dict[str, Any]]


def measure(directory: Path, command: str, code: int = 0) -> Rows:
    """Run `dcpmla bench`, which exits with a code; return the rows of its result file, `bench.json` in a directory."""
    out = directory / "bench.json"
    assert main(["bench", *command.split(), "--device", "cpu", "--commit", "abc", "--json", str(out)]) == code
    content = json.loads(out.read_text())
    assert list(content)[:4] == ["commit", "machine", "versions", "rows"]
    assert (content["commit"], content["machine"]) == ("abc", "1 x CPU")
    rows: Rows = content["rows"]
    return rows


def measure_on_gpus(directory: Path, command: str, num_gpus: int) -> dict[str, Any]:
    """Run `dcpmla bench` under torchrun, a rank for each GPU; return its result file."""
    out = directory / "bench.json"
    program = ["-m", "dcpmla", "bench", *command.split(), "--json", out]
    run_together([(torchrun(program, num_gpus), {})])
    content: dict[str, Any] = json.loads(out.read_text())
    for row in content["rows"]:
        assert row["in_graph"]
        assert 0 < row["median_us"] < 1e5
    return content


def refuse(command: str, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Run `dcpmla bench` with a mistake: one line names it, and nothing else is printed."""
    assert main(["bench", *command.split(), "--device", "cpu"]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert len(captured.err.strip().splitlines()) == 1
