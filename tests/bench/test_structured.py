"""The benchmark of grammars on CPUs: it runs to its end, and writes rows of the vocabulary."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import structured
from dcpmla.bench.results import unknown_fields


@pytest.mark.usefixtures("one_process_on_cpu")
def test_streams_with_a_schema(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "structured.json"
    options = "--geometry tiny --device cpu --num-requests 2 --input-len 4 --output-len 8 --repeats 1 --commit abc"
    monkeypatch.setattr(sys, "argv", ["structured.py", *f"{options} --json {out}".split()])
    structured.main()
    rows = json.loads(out.read_text())["rows"]
    assert [row["load"] for row in rows] == ["schema on none", "schema on half", "schema on all"]
    assert all(row["time_per_token_mean"] > 0 for row in rows)
    assert not unknown_fields(rows)
