"""The number of tokens from which a layout over ranks is faster than tensor parallelism alone."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dcpmla.bench.layer import crossovers

TIMES = st.dictionaries(st.tuples(st.integers(1, 3), st.sampled_from([8, 16, 24])), st.integers(1, 3), min_size=1)


def rows_of(times: dict[int, dict[tuple[int, int], int]], kv_cache_dtype: str = "bf16") -> list[dict[str, Any]]:
    """Total times by DCP size, batch and context, in rows as they were before they named a kind of layers."""
    names = {"exchange": "a2a", "variant": "", "kv_cache_dtype": kv_cache_dtype, "decode_query_dtype": "auto"}
    return [
        {"part": part, "dcp": dcp, **names, "batch": batch, "context": context, "median_us": time * factor}
        for dcp, loads in times.items()
        for (batch, context), time in loads.items()
        for part, factor in (("total", 1), ("attention", -1))
    ]


@given(TIMES, TIMES)
def test_from_the_crossover_on_every_load_is_faster(
    plain: dict[tuple[int, int], int], sharded: dict[tuple[int, int], int]
) -> None:
    both = plain.keys() & sharded.keys()
    found = crossovers(rows_of({1: plain, 4: sharded}))
    if not both:
        assert not found
        return
    ((entry),) = found
    totals = {load: load[0] * load[1] for load in both}
    fits = [
        total
        for total in totals.values()
        if all(sharded[load] < plain[load] for load in totals if totals[load] >= total)
    ]
    assert entry["tokens"] == min(fits, default=None)  # by trying every total


def test_without_plain_tp_there_is_no_crossover() -> None:
    assert crossovers(rows_of({2: {(1, 8): 1}})) == []


def test_crossovers_are_between_caches_of_the_same_format() -> None:
    rows = rows_of({1: {(1, 8): 3}, 2: {(1, 8): 2}}) + rows_of({1: {(1, 8): 1}, 2: {(1, 8): 2}}, "fp8")
    assert [(entry["kv_cache_dtype"], entry["tokens"]) for entry in crossovers(rows)] == [("bf16", 8), ("fp8", None)]
    assert crossovers(rows_of({1: {(1, 8): 3}}) + rows_of({2: {(1, 8): 2}}, "fp8")) == []
