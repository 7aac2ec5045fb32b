"""Rows of `benchmarks/in_vllm.py`, as far as they need no vLLM: their fields are in the vocabulary."""

from benchmarks.vllm_engine import prefill_row, row_of
from dcpmla.bench.results import unknown_fields
from dcpmla.bench.timing import Timing


def test_fields_are_known() -> None:
    timing = Timing(3.0, in_graph=True)
    rows = [row_of("decode", timing, 2, 64)]
    rows += [prefill_row(timing, 8, 64, 5.0, is_absorbed) for is_absorbed in (True, False)]
    assert [row.get("route") for row in rows] == [None, "absorbed", "mha"]
    assert not unknown_fields(rows)
