"""`bench turns` on CPUs: a row for each case and route, and its mistakes."""

import json
from pathlib import Path

import pytest

from dcpmla.__main__ import main

TINY = ["bench", "turns", "--device", "cpu", "--geometry", "v2-lite", "--heads", "4", "--commit", "abc"]


@pytest.mark.usefixtures("one_process_on_cpu")
def test_a_row_for_each_case_and_route(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "turns.json"
    options = ["--tokens", "3,20", "--context", "32", "--batch", "2", "--json", str(out)]
    assert main([*TINY, *options]) == 0
    rows = json.loads(out.read_text())["rows"]
    cases = [(row["query_len"], row["decodes"], row["route"]) for row in rows]
    assert cases == [(num, decodes, route) for num in (3, 20) for decodes in (0, 1) for route in ("mha", "absorbed")]
    for row in rows:
        assert (row["batch"], row["context"], row["heads"], row["tp"], row["dcp"]) == (2, 32, 4, 1, 1)
        assert row["median_us"] > 0
    assert [sum(row["is_chosen"] for row in pair) for pair in zip(rows[::2], rows[1::2], strict=True)] == [1] * 4
    assert "2 x 20 new tokens after 32 and 1 decode" in capsys.readouterr().out


@pytest.mark.usefixtures("one_process_on_cpu")
def test_ranks_that_a_cache_cannot_have(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "-dcp", "2"]) != 0
    assert "decode_context_parallel_size (-dcp) is 2; it must divide the number of ranks, 1" in capfd.readouterr().err


@pytest.mark.usefixtures("one_process_on_cpu")
def test_layers_without_routes_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--geometry", "tiny-v4"]) != 0
    assert "geometry (--geometry) is tiny-v4; its layers must be MLA" in capfd.readouterr().err
