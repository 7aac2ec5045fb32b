"""Rows of `benchmarks/in_vllm.py`, as far as they need no vLLM: their fields are in the vocabulary."""

import runpy
from pathlib import Path

from dcpmla.bench.results import unknown_fields
from dcpmla.bench.timing import Timing

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "in_vllm.py"


def test_fields_are_known() -> None:
    functions = runpy.run_path(str(SCRIPT))
    timing = Timing(3.0, in_graph=True)
    rows = [functions["row_of"]("decode", timing, 2, 64)]
    rows += [functions["prefill_row"](timing, 8, 64, 5.0, is_absorbed) for is_absorbed in (True, False)]
    assert [row.get("route") for row in rows] == [None, "absorbed", "mha"]
    assert not unknown_fields(rows)
