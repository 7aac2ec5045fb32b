"""A synthetic load for the engine."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dcpmla.runtime.engine import Engine
from dcpmla.runtime.request import Request
from dcpmla.runtime.sampling import SamplingParams


@dataclass(frozen=True)
class Load:
    """Requests of random tokens.

    Attributes:
        arrival_times: seconds after the load's beginning, ascending.
        prompts: token ids.
        output_lens: new tokens of each request.
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
    """Poisson arrivals, lengths drawn evenly from the lists; the same everywhere for the same arguments.

    Each part draws from a stream of its own: at another rate come the same requests, and more of them begin with
        the same.

    Args:
        request_rate: requests a second on average; inf: all at once.
    """
    times, inputs, outputs, tokens = (np.random.default_rng(stream) for stream in np.random.SeedSequence(seed).spawn(4))
    return Load(
        arrival_times=times.exponential(1 / request_rate, num_requests).cumsum().tolist(),
        prompts=[
            tokens.integers(vocab_size, size=length).tolist() for length in inputs.choice(input_lens, num_requests)
        ],
        output_lens=outputs.choice(output_lens, num_requests).tolist(),
    )


def add_load(engine: Engine, load: Load) -> list[Request]:
    """Queue a load, greedy and of exact lengths; the engine's clock is at 0 as it begins.

    Raises:
        ValueError: a request that the whole cache has no room for.
    """
    requests = [
        engine.add(
            prompt, SamplingParams(max_new_tokens=output_len, ignore_eos=True), request_id=index, arrival_time=time
        )
        for index, (time, prompt, output_len) in enumerate(
            zip(load.arrival_times, load.prompts, load.output_lens, strict=True)
        )
    ]
    engine.restart_clock()  # queueing a large load takes its time
    return requests


def request_rate(text: str) -> float:
    """For argparse: a positive number, or inf."""
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not rate > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of requests a second above 0; inf: all at once")
    return rate
