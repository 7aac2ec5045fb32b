"""Steps over a sharded cache compared with plain TP: what sharding adds to a layer, how it scales, and from which
load on it is faster.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dcpmla.bench.plots import grouped, select
from dcpmla.bench.results import Row
from dcpmla.bench.stack import CANDIDATES

Load = tuple[int, int]  # requests, cached tokens of each
MLA = "mla"  # a kind of layers; the others are `LayerKind.label`s


class Layout(NamedTuple):
    """Cache layout and exchange of a kind of layers, with the field names of `bench layer`'s rows; older files lack the
    fields with a default.
    """

    dcp: int
    exchange: str
    variant: str
    kv_cache_dtype: str
    decode_query_dtype: str = "auto"
    layer_kind: str = MLA
    index_cache_dtype: str = "auto"

    @property
    def compared(self) -> tuple[str, str, str, str]:
        """Kind of layers, dtypes of caches and queries. Layouts of the same ones are compared."""
        return self.layer_kind, self.kv_cache_dtype, self.decode_query_dtype, self.index_cache_dtype


def layout_of(row: Mapping[str, Any]) -> Layout:
    """Return the layout of a row of `bench layer`."""
    return Layout(**{name: row[name] for name in Layout._fields if name in row})


def load_of(row: Mapping[str, Any]) -> Load:
    """Return a row's batch and context."""
    return row["batch"], row["context"]


def compare_with_plain(rows: Sequence[Row], plain_rows: Sequence[Row]) -> None:
    """Add to the rows of a step their comparison with the rows of plain TP (dcp 1) at the same load.

    `scaling_efficiency`, of the total, of attention and of the selection: the time under dcp 1 / (dcp x time). 1 is
    ideal: W ranks, each with 1 / W of the same cached tokens, take 1 / W of the time.
    `added_us_per_layer`, of the total: the time that sharding adds to a layer outside attention and the selection; the
    exchange of candidates counts as added. It is below zero where sharding saves more than it adds.
    """
    times, plain = ({row["part"]: row["median_us"] for row in step} for step in (rows, plain_rows))
    for row in rows:
        if row["part"] in ("total", "attention", "selection"):
            ideal = plain[row["part"]] / row["dcp"]
            row["scaling_efficiency"] = round(ideal / row["median_us"], 3)
        if row["part"] == "total":
            row["added_us_per_layer"] = round((_apart(times) - _apart(plain)) / row["num_layers"], 1)


def _apart(times: Mapping[str, float]) -> float:
    """Return the time of a step without attention and the selection, but with the exchange of candidates."""
    selection = times.get("selection", 0.0) - times.get(CANDIDATES, 0.0)
    return times["total"] - times["attention"] - selection


def speedups_of(rows: Sequence[Row]) -> dict[Layout, list[tuple[int, float]]]:
    """Return for each layout with a DCP size above 1 the cached tokens of all requests of each load, and the time under
    dcp 1, with the same kind of layers and the same dtypes, over its own. A load that only fits when sharded does not
    count.
    """
    totals = grouped(select(rows, part="total"), layout_of)
    times = {layout: {load_of(row): row["median_us"] for row in of_layout} for layout, of_layout in totals}
    plain = {layout.compared: of_loads for layout, of_loads in times.items() if layout.dcp == 1}
    speedups = {}
    for layout, of_loads in times.items():
        both = plain.get(layout.compared, {}).keys() & of_loads
        if layout.dcp > 1 and both:
            ratios = [(load[0] * load[1], plain[layout.compared][load] / of_loads[load]) for load in both]
            speedups[layout] = sorted(ratios)
    return speedups


def crossovers(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Compare every layout with a DCP size above 1 with dcp 1, the same kind of layers and the same dtypes.

    Returns:
        For each layout its fields, and `tokens`: the smallest total of cached tokens (batch x context) from which on
        every load is faster than under dcp 1, None where the largest is not.
    """
    results = []
    for layout, speedups in speedups_of(rows).items():
        slower = max((tokens for tokens, ratio in speedups if ratio <= 1), default=0)
        faster = min((tokens for tokens, _ in speedups if tokens > slower), default=None)
        results.append({**layout._asdict(), "tokens": faster})
    return results
