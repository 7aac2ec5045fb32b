"""A load for a server or an engine, and latencies and rates of what came of it."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dcpmla.bench.results import Row

_PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Load:
    """Requests of random tokens.

    Attributes:
        arrival_times: Seconds after the load's beginning, ascending.
        prompts: Token ids.
        output_lens: New tokens of each request.
    """

    arrival_times: list[float]
    prompts: list[list[int]]
    output_lens: list[int]


def request_rate(text: str) -> float:
    """Read a positive number, or inf, for argparse."""
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not rate > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of requests a second above 0; inf: all at once")
    return rate


def summarize(values: Sequence[float]) -> dict[str, float | None]:
    """Return mean and percentiles (linear between neighbors); None where there are no values."""
    names = ["mean", *(f"p{percentile}" for percentile in _PERCENTILES)]
    if not values:
        return dict.fromkeys(names)
    numbers = [np.mean(values), *np.percentile(values, _PERCENTILES)]
    return {name: round(float(number), 6) for name, number in zip(names, numbers, strict=True)}


def summarize_all(metrics: Sequence[Mapping[str, float | None]]) -> Row:
    """Return mean and percentiles of each kind of latency, over the requests that have one."""
    values = {kind: [value for each in metrics if (value := each[kind]) is not None] for kind in metrics[0]}
    return {f"{kind}_{name}": value for kind, each in values.items() for name, value in summarize(each).items()}


def rates(num_requests: int, num_input: int, num_output: int, seconds: float) -> Row:
    """Return requests, tokens of prompts and new tokens per second; seconds above 0."""
    return {
        "seconds": round(seconds, 6),
        "requests_per_second": round(num_requests / seconds, 3),
        "input_tokens_per_second": round(num_input / seconds, 1),
        "output_tokens_per_second": round(num_output / seconds, 1),
    }
