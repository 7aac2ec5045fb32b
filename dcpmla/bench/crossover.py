"""Steps over a sharded cache beside those of plain TP: what they add to a layer, and from which load on they are
faster.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dcpmla.bench.cache_formats import quantized_name

Row = Mapping[str, Any]
Load = tuple[int, int]  # requests, cached tokens of each


class Layout(NamedTuple):
    """How the cache lies and what is exchanged; fields are those of the rows of `bench layer`."""

    dcp: int
    dcp_comm_backend: str
    variant: str
    kv_cache_dtype: str
    decode_query_dtype: str

    @property
    def dtypes(self) -> tuple[str, str]:
        """Of cache and queries. Layouts of the same ones are set against each other."""
        return self.kv_cache_dtype, self.decode_query_dtype

    def __str__(self) -> str:
        exchange = f" {self.dcp_comm_backend} {self.variant}".rstrip() if self.dcp > 1 else ""
        return ", ".join(filter(None, [f"dcp {self.dcp}{exchange}", quantized_name(*self.dtypes)]))


def layout_of(row: Row) -> Layout:
    return Layout(*(row[field] for field in Layout._fields))


def added_us_per_layer(rows: Sequence[Row], plain_rows: Sequence[Row]) -> float:
    """What DCP adds to each layer of a step beside what it changes of attention itself; below zero where it saves
    more than it adds.

    Args:
        rows, plain_rows: of one step of `bench layer` and of the same load under dcp 1.
    """

    def beside_attention(rows: Sequence[Row]) -> float:
        times = {row["part"]: row["median_us"] for row in rows}
        return float(times["total"] - times["attention"])

    return (beside_attention(rows) - beside_attention(plain_rows)) / int(rows[0]["num_layers"])


def crossovers(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Of every layout of a DCP size above 1 among the rows of `bench layer`, against dcp 1 with the same dtypes.

    Loads count that were measured under both; a load that only fits when sharded does not.

    Returns:
        the layout's fields; `tokens`, the smallest total of cached tokens (batch x context) from which on every
        load is faster than under dcp 1, None where the largest is not; `context_at_batch`, for each batch the smallest
        context from which on
        it is, or None.
    """
    totals: dict[Layout, dict[Load, float]] = {}
    for row in rows:
        if row["part"] == "total":
            totals.setdefault(layout_of(row), {})[row["batch"], row["context"]] = row["median_us"]
    plain = {layout.dtypes: times for layout, times in totals.items() if layout.dcp == 1}
    found = []
    for layout, times in totals.items():
        unsharded = plain.get(layout.dtypes, {})
        is_faster = {load: times[load] < unsharded[load] for load in times if load in unsharded}
        if layout.dcp > 1 and is_faster:
            at_batch = {
                str(batch): _first_of_the_faster(_contexts(is_faster, batch))
                for batch in sorted({load[0] for load in is_faster})
            }
            tokens = _first_of_the_faster([(batch * context, faster) for (batch, context), faster in is_faster.items()])
            found.append({**layout._asdict(), "tokens": tokens, "context_at_batch": at_batch})
    return found


def _contexts(is_faster: Mapping[Load, bool], batch: int) -> list[tuple[int, bool]]:
    return [(context, faster) for (other, context), faster in is_faster.items() if other == batch]


def _first_of_the_faster(sizes: Sequence[tuple[int, bool]]) -> int | None:
    """The smallest size from which on every one is faster."""
    slower = max((size for size, faster in sizes if not faster), default=0)
    return min((size for size, _ in sizes if size > slower), default=None)
