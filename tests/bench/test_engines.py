"""benchmarks/engines.py: rows of both engines become results, the fastest repeats, and ratios of the same work."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import engines
from dcpmla.bench.results import unknown_fields

TURNS = "16 conversations at 2.5/s, 4 turns, 8,192 + 32 / 64"


def measured(engine: str, load: str = "2", wall: float = 4.0, **changes: Any) -> dict[str, Any]:
    """Return a row of a run."""
    versions = {"torch": "2.11.0", **({"vllm": "0.33.0"} if engine == "vllm" else {})}
    row = {
        **{"engine": engine, "model": "v2lite", "tp": 1, "dcp": 1, "comm": None if engine == "vllm" else "none"},
        **{"tag": "", "limits": "8,192 tokens, 128 requests", "import_s": 5.0, "start_s": 30.0, "device": "GPU"},
        **{"versions": versions, "graph_sizes": [1, 2], "load": load, "requests": 32, "in": 1024, "out": 256},
        **{"repeat": 0, "wall_s": wall, "tok_s": 8192 / wall, "ttft_s": wall / 8, "ttft_max_s": wall / 4},
        **{"tpot_s": wall / 256, "what": "32 x 1,024 / 256", "first": [[1, 2, 3]], "job": "job"},
    }
    return row | changes


def conversation(engine: str, p99: float) -> dict[str, Any]:
    sizes = {"requests": 64, "in": 8480, "out": 64, "what": TURNS, "limits": "512 tokens, 8 requests, prefix caching"}
    return measured(engine, "c", 9.0, **sizes, ttft_p99_s=0.5, itl_p99_s=p99, itl_max_s=0.2, cached_tokens=70000)


@pytest.fixture(autouse=True)
def _arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = tmp_path / "machine"
    options = ["--json", machine / "engines.json", "--commit", "abc", "--plot", machine / "engines.png"]
    monkeypatch.setattr(sys, "argv", ["engines.py", *map(str, options)])


def convert(directory: Path, *calls: list[dict[str, Any]]) -> dict[str, Any]:
    """Run the script over the rows of calls; return its result."""
    for index, rows in enumerate(calls):
        path = directory / f"{index}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        sys.argv.insert(index + 1, str(path))
    engines.main()
    result: dict[str, Any] = json.loads((directory / "machine" / "engines.json").read_text())
    return result


def test_results_and_ratios(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dcpmla = [measured("dcpmla", wall=2.0), measured("dcpmla", wall=1.0, repeat=1), conversation("dcpmla", 0.02)]
    vllm = [measured("vllm", wall=4.0), measured("vllm", wall=5.0, repeat=1), conversation("vllm", 0.04)]
    eager = measured("vllm", wall=8.0, graph_sizes=[])
    other = measured("dcpmla", wall=0.5, limits="512 tokens, 128 requests")
    result = convert(tmp_path, [*dcpmla, *vllm, eager, other], [measured("vllm", tp=2, dcp=2, comm="a2a", wall=3.0)])
    table = capsys.readouterr().out
    assert len(table.splitlines()) == 4, table  # a header, and two pairs: other limits, modes and calls are other work
    start = "| 1 | v2lite | 1 x 1 |"
    assert f"{start} 2 | 8,192 | dcpmla / vllm | 4.00 (8,192 / 2,048) | 0.25 (125.0 / 500.0)" in table
    assert f"{start} c | 512 | dcpmla / vllm | 1.00 (910 / 910)" in table
    assert "| 0.50 (20.00 / 40.00) |" in table
    assert (tmp_path / "machine" / "engines.png").read_bytes().startswith(b"\x89PNG")
    assert (result["commit"], result["machine"]) == ("abc", "2 x GPU")
    assert result["versions"] == {"torch": "2.11.0", "vllm": "0.33.0"}
    assert not unknown_fields(result["rows"])
    first, turns = (
        next(row for row in result["rows"] if (row["engine"], row["load"]) == case)
        for case in (("dcpmla", "2"), ("vllm", "c"))
    )
    assert first["seconds"] == 1.0
    assert (first["max_num_batched_tokens"], first["max_num_seqs"], first["enable_prefix_caching"]) == (
        8192,
        128,
        False,
    )
    assert (first["start_seconds"], first["import_seconds"], first["mode"]) == (30.0, 5.0, "graph")
    expected = {"request_rate": 2.5, "num_turns": 4, "input_len": 8192, "turn_len": 32, "output_len": 64}
    expected |= {"num_requests": 64, "enable_prefix_caching": True, "max_num_batched_tokens": 512}
    expected |= {"inter_token_p99": 0.04, "time_to_first_token_p99": 0.5, "num_cached_tokens": 70000}
    assert expected.items() <= turns.items()


def test_rows_without_a_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(convert(tmp_path, [measured("dcpmla")], [measured("vllm")])["rows"]) == 2
    assert not (tmp_path / "machine" / "engines.png").exists()
    assert capsys.readouterr().out == "no load has rows of both engines from one call\n"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([measured("dcpmla"), measured("vllm", device="another GPU")], "rows are of GPU and another GPU"),
        ([measured("dcpmla"), measured("vllm", versions={"torch": "2.14"})], "rows are of torch 2.11.0 and 2.14"),
        ([measured("dcpmla", limits="many tokens")], "limits is 'many tokens'; allowed is"),
        ([measured("dcpmla", load="c")], "what is '32 x 1,024 / 256'; allowed is"),
        ([{"engine": "dcpmla"}], "0.jsonl:1 lacks dcp, device,"),
        ([], "0.jsonl has no rows"),
    ],
)
def test_refusals(rows: list[dict[str, Any]], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        convert(tmp_path, rows)
    assert message in capsys.readouterr().err
    assert not (tmp_path / "machine").exists()
