"""What came of a load that an engine served: rows, a table, a plot."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from dcpmla.bench.plots import new_figure, save_figure
from dcpmla.cache.latent import num_blocks
from dcpmla.runtime.engine import Engine
from dcpmla.runtime.request import Request

_PERCENTILES = (50, 90, 99)
_DISTRIBUTIONS = {
    "time_to_first_token": "time to first token, s",
    "time_per_token": "time per token, s",
    "end_to_end_seconds": "end to end, s",
}

Row = dict[str, Any]


@dataclass(frozen=True)
class Served:
    """One load under one DCP size.

    Attributes:
        row: parameters and results, by name.
        latencies: seconds of each request, by kind; one with a single new token has no time per token.
        running: (seconds after the load's beginning, running requests) after each step.
    """

    row: Row
    latencies: dict[str, list[float]]
    running: list[tuple[float, int]]

    @classmethod
    def of(cls, engine: Engine, requests: Sequence[Request], running: Sequence[tuple[float, int]]) -> Self:
        """Of finished requests, and of the engine that served them and no others since its `stats` and its clock were
        new.
        """
        latencies = _latencies(requests)
        seconds = max(
            request.arrival_time + delay
            for request, delay in zip(requests, latencies["end_to_end_seconds"], strict=True)
        )
        row = {
            **_capacity(engine, requests),
            "max_num_running": engine.stats.max_num_running,
            "num_preemptions": engine.stats.num_preemptions,
            "num_cached_tokens": engine.stats.num_cached_tokens,
            **_throughput(requests, seconds),
            **{
                f"{kind}_{name}": value
                for kind, values in latencies.items()
                for name, value in summarize(values).items()
            },
        }
        return cls(row, latencies, list(running))


def summarize(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and percentiles (linear between neighbours); None where there are no values."""
    names = ["mean", *(f"p{percentile}" for percentile in _PERCENTILES)]
    if not values:
        return dict.fromkeys(names)
    numbers = [np.mean(values), *np.percentile(values, _PERCENTILES)]
    return {name: round(float(number), 6) for name, number in zip(names, numbers, strict=True)}


def table(rows: Sequence[Row]) -> list[str]:
    """A line for each name, a column for each row."""
    cells = [[name, *(_cell(row[name]) for row in rows)] for name in rows[0]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join([name.ljust(widths[0]), *map(str.rjust, values, widths[1:])]) for name, *values in cells]


def plot_served(path: Path, results: Sequence[Served]) -> None:
    """Running requests over time, and the share of requests within each latency, a line for each result."""
    row = results[0].row
    load = f"{row['num_requests']} requests, {row['request_rate']} a second"
    title = f"{load}, tp {row['tp']}, {row['kv_cache_bytes_per_rank']:,} bytes of cache a rank"
    figure, (running, *distributions) = new_figure(title, num_axes=1 + len(_DISTRIBUTIONS), width=4.8)
    for result in results:
        name = f"dcp {result.row['dcp']}" if result.row["dcp"] > 1 else "dcp 1 (tp only)"
        running.step(*zip(*result.running, strict=True), where="post", label=name)
        for axes, kind in zip(distributions, _DISTRIBUTIONS, strict=True):
            if result.latencies[kind]:
                axes.ecdf(result.latencies[kind], label=name)
    running.set_ylabel("running requests")
    running.set_xlabel("seconds")
    running.legend()
    distributions[0].set_ylabel("share of requests")
    for axes, label in zip(distributions, _DISTRIBUTIONS.values(), strict=True):
        axes.set_xlabel(label)
    save_figure(path, figure)


def _latencies(requests: Sequence[Request]) -> dict[str, list[float]]:
    return {
        "queue_seconds": _metric("queue_seconds", requests),
        "time_to_first_token": _metric("time_to_first_token", requests),
        "time_per_token": _metric("time_per_token", [request for request in requests if len(request.token_ids) > 1]),
        "end_to_end_seconds": [_end_to_end(request) for request in requests],
    }


def _metric(name: str, requests: Sequence[Request]) -> list[float]:
    return [seconds for request in requests if (seconds := request.metrics()[name]) is not None]


def _end_to_end(request: Request) -> float:
    assert request.finish_time is not None
    return request.finish_time - request.arrival_time


def _capacity(engine: Engine, requests: Sequence[Request]) -> Row:
    """What the cache holds: tokens, and such requests at their full lengths."""
    sizes, blocks = engine.cache.sizes, [num_blocks(request.max_seq_len, engine.dcp) for request in requests]
    return {
        "kv_cache_bytes_per_rank": sizes.bytes_per_rank,
        "kv_tokens_total": sizes.tokens_total,
        "num_fit_mean": sizes.num_blocks * len(blocks) // sum(blocks),
        "num_fit_largest": sizes.num_blocks // max(blocks),
    }


def _throughput(requests: Sequence[Request], seconds: float) -> Row:
    """Over the seconds from the load's beginning to the end of its last request."""
    return {
        "seconds": round(seconds, 6),
        "requests_per_second": round(len(requests) / seconds, 3),
        "input_tokens_per_second": round(sum(len(request.prompt_token_ids) for request in requests) / seconds, 1),
        "output_tokens_per_second": round(sum(len(request.token_ids) for request in requests) / seconds, 1),
    }


def _cell(value: Any) -> str:
    match value:
        case None:
            return "-"
        case bool() | str():
            return str(value)
        case int():
            return f"{value:,}"
        case float():
            return f"{value:,.4f}"
        case _:
            return ",".join(map(str, value))
