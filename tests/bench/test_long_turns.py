"""The benchmark of long turns runs to its end on a short conversation, and times all parts."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import long_turns
from dcpmla.bench.results import unknown_fields

PARTS = "render encode_each encode_first parse conversation prompt pack unpack tokens check"
OF_BLOCKS = "hash_first find_known hash schedule block_table free"


def test_all_parts_of_a_turn_are_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "long_turns.json"
    options = "--context 6000 --block-tokens 16 --vocabulary 600 --repeats 1 --commit abc"
    monkeypatch.setattr(sys, "argv", ["long_turns.py", *options.split(), "--json", str(out)])
    long_turns.main()
    rows = json.loads(out.read_text())["rows"]
    assert not unknown_fields(rows)
    assert {row["model"] for row in rows} == {"chat", "large"}
    assert [row["part"] for row in rows if row["model"] == "chat"] == f"{PARTS} {OF_BLOCKS}".split()
    assert all(row["fastest_us"] > 0 and row["tokens"] > 3000 for row in rows)
