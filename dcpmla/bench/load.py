"""A synthetic load for the engine, and what came of it."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dcpmla.bench.results import Row, dtype_name
from dcpmla.cache.formats import format_name
from dcpmla.integrations.open_model import ModelFiles
from dcpmla.runtime.engine import Engine
from dcpmla.runtime.request import Request
from dcpmla.runtime.sampling import SamplingParams

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

    @property
    def seq_lens(self) -> list[int]:
        """Tokens that end up in the cache: all but each request's last."""
        return [len(prompt) + output_len - 1 for prompt, output_len in zip(self.prompts, self.output_lens, strict=True)]


def make_load(
    num_requests: int,
    request_rate: float,
    input_lens: Sequence[int],
    output_lens: Sequence[int],
    vocab_size: int,
    seed: int,
) -> Load:
    """Draw Poisson arrivals, and lengths evenly from the lists; the same everywhere for the same arguments.

    Each part draws from a stream of its own: another rate brings the same requests, and a longer load begins with those
    of a shorter one.

    Args:
        request_rate: Requests a second on average; inf: all at once.
    """
    times, inputs, outputs, tokens = (np.random.default_rng(stream) for stream in np.random.SeedSequence(seed).spawn(4))
    lens = inputs.choice(input_lens, num_requests)
    return Load(
        arrival_times=times.exponential(1 / request_rate, num_requests).cumsum().tolist(),
        prompts=[tokens.integers(vocab_size, size=length).tolist() for length in lens],
        output_lens=outputs.choice(output_lens, num_requests).tolist(),
    )


def add_load(engine: Engine, load: Load) -> list[Request]:
    """Queue a load, greedy and of exact lengths; the engine's clock is at 0 as it begins.

    Raises:
        ValueError: A request that the whole cache has no room for.
    """
    requests = []
    for index, (time, prompt) in enumerate(zip(load.arrival_times, load.prompts, strict=True)):
        params = SamplingParams(max_new_tokens=load.output_lens[index], ignore_eos=True)
        requests.append(engine.add(prompt, params, request_id=index, arrival_time=time))
    engine.restart_clock()  # queueing a large load takes its time
    return requests


def engine_fields(args: argparse.Namespace, engine: Engine, exchange: str, options: Sequence[str]) -> Row:
    """Return the fields of a row on an engine: its model, its layout, and options by their names."""
    return {
        "model": Path(args.model).name,  # a path of this machine is left out
        "tp": engine.mesh.tp_size,
        "dcp": engine.mesh.dcp_size,
        "exchange": exchange,
        **{name: (vars(args) | vars(engine.dcp))[name] for name in options},
        "dtype": dtype_name(engine.model.dtype),
        "kv_cache_dtype": format_name(engine.cache.sizes.dtype),
    }


def check_lengths(files: ModelFiles, lengths: Mapping[str, int]) -> None:
    """Raise ValueError for lengths of a prompt and an answer, by their options, that are too long for a model."""
    total, (first, second) = sum(lengths.values()), (f"{option} {length}" for option, length in lengths.items())
    if total > files.max_model_len:
        served = f"with --max-model-len {files.max_model_len} at most that many are served"
        raise ValueError(f"{first} and {second}, together {total} tokens; {served}")


def request_rate(text: str) -> float:
    """Read a positive number, or inf, for argparse."""
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not rate > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of requests a second above 0; inf: all at once")
    return rate


def served_row(engine: Engine, requests: Sequence[Request]) -> Row:
    """Return the results of finished requests, by name, from an engine that served no others since its `stats` and its
    clock were new.
    """
    metrics = [_metrics(request) for request in requests]
    ends = zip(requests, metrics, strict=True)
    seconds = max(request.arrival_time + (each["end_to_end_seconds"] or 0.0) for request, each in ends)
    num_input = sum(len(request.prompt_token_ids) for request in requests)
    num_output = sum(len(request.token_ids) for request in requests)
    return {
        **_capacity(engine, requests),
        "max_num_running": engine.stats.max_num_running,
        "num_preemptions": engine.stats.num_preemptions,
        "num_cached_tokens": engine.stats.num_cached_tokens,
        **rates(len(requests), num_input, num_output, seconds),
        **summarize_all(metrics),
    }


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


def _metrics(request: Request) -> dict[str, float | None]:
    """Return the latencies of a finished request; a single new token has no time per token."""
    assert request.finish_time is not None
    metrics = {name: request.metrics()[name] for name in ("queue_seconds", "time_to_first_token", "time_per_token")}
    if len(request.token_ids) == 1:
        metrics["time_per_token"] = None
    return {**metrics, "end_to_end_seconds": request.finish_time - request.arrival_time}


def _capacity(engine: Engine, requests: Sequence[Request]) -> Row:
    """Return the cache's capacity in tokens, and in requests of this kind at their full lengths."""
    sizes = engine.cache.sizes
    blocks = [-(-request.max_seq_len // sizes.block_tokens) for request in requests]
    return {
        "kv_cache_bytes_per_rank": sizes.bytes_per_rank,
        "kv_tokens_total": sizes.tokens_total,
        "num_fit_mean": sizes.num_blocks * len(blocks) // sum(blocks),
        "num_fit_largest": sizes.num_blocks // max(blocks),
    }


def rates(num_requests: int, num_input: int, num_output: int, seconds: float) -> Row:
    """Return requests, tokens of prompts and new tokens per second; seconds above 0."""
    return {
        "seconds": round(seconds, 6),
        "requests_per_second": round(num_requests / seconds, 3),
        "input_tokens_per_second": round(num_input / seconds, 1),
        "output_tokens_per_second": round(num_output / seconds, 1),
    }
