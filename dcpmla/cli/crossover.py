"""From which load on a sharded cache makes a decode step faster than plain TP does."""

from collections.abc import Mapping, Sequence
from typing import Any

Load = tuple[int, int]  # requests, cached tokens of each


def crossovers(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of every DCP size above 1 and exchange among the rows of `bench layer`.

    Loads count that were measured under both; a load that only fits when sharded does not.

    Returns:
        dcp, dcp_comm_backend; `tokens`, the smallest total of cached tokens (batch x context) from which on every load is faster than under
        dcp 1, None where the largest is not; `context_at_batch`, for each batch the smallest context from which on it is, or None.
    """
    totals: dict[tuple[int, str], dict[Load, float]] = {}
    for row in rows:
        if row["part"] == "total":
            totals.setdefault((row["dcp"], row["dcp_comm_backend"]), {})[row["batch"], row["context"]] = row["median_us"]
    plain = next((times for (dcp, _), times in totals.items() if dcp == 1), {})
    found = []
    for (dcp, backend), times in totals.items():
        is_faster = {load: times[load] < plain[load] for load in times if load in plain}
        if dcp > 1 and is_faster:
            at_batch = {str(batch): _first_of_the_faster(_contexts(is_faster, batch)) for batch in sorted({load[0] for load in is_faster})}
            tokens = _first_of_the_faster([(batch * context, faster) for (batch, context), faster in is_faster.items()])
            found.append({"dcp": dcp, "dcp_comm_backend": backend, "tokens": tokens, "context_at_batch": at_batch})
    return found


def _contexts(is_faster: Mapping[Load, bool], batch: int) -> list[tuple[int, bool]]:
    return [(context, faster) for (other, context), faster in is_faster.items() if other == batch]


def _first_of_the_faster(sizes: Sequence[tuple[int, bool]]) -> int | None:
    """The smallest size from which on every one is faster."""
    slower = max((size for size, faster in sizes if not faster), default=0)
    return min((size for size, _ in sizes if size > slower), default=None)
