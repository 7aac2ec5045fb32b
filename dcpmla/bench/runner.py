"""What the benchmarks of layers share: the exchange of a DCP group, timed; measurements that may not fit."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from dcpmla.bench.exchange_inputs import Combine, ExchangeCase, GatherHeads, exchange_of
from dcpmla.bench.timing import CALLS_PER_SAMPLE, Operation, Timing, time_operation
from dcpmla.cli.options import Job
from dcpmla.config import MLAConfig
from dcpmla.job.bootstrap import agree
from dcpmla.job.faults import is_out_of_memory

BACKENDS = ("a2a", "ag_rs")
_TIMEOUTS = 5  # that one measurement may take, kernels' compilation in it


@contextmanager
def measurement(args: argparse.Namespace, job: Job, name: str) -> Iterator[None]:
    """What does not fit on some rank (ValueError on all) is skipped, with a line: it may fit at the next size."""
    job.watchdog.enter(name, _TIMEOUTS * args.timeout)
    try:
        yield
    except ValueError as error:
        if job.ranks.is_first:
            print(f"skipped: {name}: {error}", flush=True)
    if job.ranks.device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def memory_on_all() -> Iterator[None]:
    """Around allocations: where some rank has no room for them, every rank raises a ValueError. Collective."""
    with agree():
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise ValueError(str(error).partition("\n")[0] or "out of memory") from error


def exchange_timings(
    config: MLAConfig, group: dist.ProcessGroup, num_tokens: int, device: torch.device, dtype: torch.dtype
) -> list[tuple[dict[str, Any], Timing]]:
    """`gather_heads` and `combine` of all heads over a group, by backend, and the all-reduce of a layer's output.
    Collective over the job.

    Returns:
        (what it is, its time) of each: keys operation, backend (none for all_reduce), dcp, num_tokens and the sizes
    of a row.
    Raises:
        ValueError: so many tokens do not fit.
    """
    calls = num_calls(device)
    case = ExchangeCase(
        group, calls, num_tokens, config.num_heads, config.latent_dim, config.kv_lora_rank, device, dtype
    )
    with memory_on_all():
        gather, combine = GatherHeads(case), Combine(case)
        hidden = torch.zeros(
            calls, num_tokens, config.hidden_size, device=device, dtype=dtype
        )  # summed again and again
    operations: dict[tuple[str, ...], Operation] = {
        ("all_reduce",): lambda index: dist.all_reduce(hidden[index], group=group)
    }
    for backend in BACKENDS:
        exchange = exchange_of(group, device, dcp_comm_backend=backend)
        operations["gather_heads", backend] = partial(gather.run, exchange)
        operations["combine", backend] = partial(combine.run, exchange)
    sizes = {
        "num_heads": config.num_heads,
        "query_dim": config.latent_dim,
        "latent_dim": config.kv_lora_rank,
        "hidden_size": config.hidden_size,
    }
    return [
        (
            {
                **dict(zip(("operation", "backend"), name, strict=False)),
                "dcp": case.size,
                "num_tokens": num_tokens,
                **sizes,
            },
            time_operation(operation, device, calls, num_samples(device)),
        )
        for name, operation in operations.items()
    ]


def num_calls(device: torch.device) -> int:
    """Of an exchange, in one sample."""
    return 1 if device.type == "cpu" else CALLS_PER_SAMPLE


def num_samples(device: torch.device) -> int:
    """Of one measurement."""
    return 7 if device.type == "cpu" else 30
