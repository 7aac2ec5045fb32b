"""The time of an operation on all ranks, in a CUDA graph where one can be captured, else call by call."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dcpmla.runtime.capture import error_on_host_sync

Operation = Callable[[int], object]  # called with 0, 1, 2 ... so that it can rotate its inputs
Result = TypeVar("Result")
_CALLS_PER_SAMPLE = {"cuda": 16, "cpu": 1}
_NUM_SAMPLES = {"cuda": 30, "cpu": 7}
ROTATED_BYTES = {"cuda": 256 << 20, "cpu": 1 << 18}  # bytes between two calls over the same inputs: no L2 is larger
_MAX_SETS = 512  # nodes of a graph that small sets may cost
_FEWEST_CALLS = {"cuda": 4, "cpu": 1}  # calls of a sample
_NUM_WARM_UPS = 3
_FEWEST_SAMPLES = 5


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: the median over samples, the slowest rank's."""

    median_us: float
    in_graph: bool

    def fields(self, digits: int) -> dict[str, Any]:
        """Return the fields of a row, the time rounded."""
        return {"in_graph": self.in_graph, "median_us": round(self.median_us, digits)}


class TimeLimit:
    """The end of a benchmark between two measurements, on all ranks at once; None: there is none."""

    def __init__(self, seconds: float | None, device: torch.device) -> None:
        self._end, self._device = time.monotonic() + (math.inf if seconds is None else seconds), device

    def is_over(self) -> bool:
        """Return whether the time is over by any rank's clock. Collective over the job."""
        return largest(float(time.monotonic() >= self._end), self._device) > 0


def is_h200(device: torch.device) -> bool:
    """Return whether the planner's preset describes this device."""
    return device.type == "cuda" and "H200" in torch.cuda.get_device_name(device).split()


def calls_per_sample(device: torch.device) -> int:
    """Return how many calls of a short operation make up a sample."""
    return _CALLS_PER_SAMPLE[device.type]


def num_rotated(set_bytes: int, device: torch.device, limit: int = _MAX_SETS) -> int:
    """Return the number of sets of inputs that calls take in turn, so that no L2 keeps one until its next call."""
    return min(limit, max(1, -(-ROTATED_BYTES[device.type] // set_bytes)))


def calls_over(num_sets: int, device: torch.device) -> int:
    """Return how many calls make up a sample; each set is used equally often."""
    return num_sets * -(-_FEWEST_CALLS[device.type] // num_sets)


def time_operation(
    operation: Operation, device: torch.device, calls: int | None = None, seconds: float = math.inf
) -> Timing:
    """Time an operation of all ranks. Collective over the job.

    Args:
        calls: Calls of one sample, operation(0) ... operation(calls - 1); default: `calls_per_sample`.
        seconds: Limit for all samples, 30 on GPUs and 7 on CPUs: fewer where they would take longer, but at least 5.
    """
    calls = calls or calls_per_sample(device)
    for index in range(_NUM_WARM_UPS):
        operation(index % calls)
    graph = _capture(operation, calls) if device.type == "cuda" else None
    sample = _sampler(operation, calls, device) if graph is None else _graph_sampler(graph)
    first = largest(sample(), device)  # a graph's first replay is slower: it only shows the number that fits the time
    num_samples = int(min(_NUM_SAMPLES[device.type], max(_FEWEST_SAMPLES, seconds * 1e6 / first)))
    return Timing(_median(sample, num_samples, device) / calls, graph is not None)


def time_graph(graph: torch.cuda.CUDAGraph, device: torch.device) -> float:
    """Return microseconds of a replay of each rank's graph: the median, the slowest rank's. Collective."""
    sample = _graph_sampler(graph)
    sample()
    return _median(sample, _NUM_SAMPLES["cuda"], device)


def time_calls(operation: Operation, device: torch.device, calls: int, num_samples: int) -> float:
    """Return microseconds of one of several calls by the host's clock: the median over samples, the slowest rank's.
    Collective.
    """
    sample = _sampler(operation, calls, device)
    sample()
    return _median(sample, num_samples, device) / calls


def profile_kernels(operation: Callable[[], object]) -> torch.profiler.profile:
    """Run an operation on the GPU once, with a profile of its kernels."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        operation()
        torch.cuda.synchronize()
    return profile


def _median(sample: Callable[[], float], num_samples: int, device: torch.device) -> float:
    times = []
    for _ in range(num_samples):
        dist.barrier()
        times.append(sample())
    return largest(statistics.median(times), device)


def time_with_result(
    operation: Callable[[int], Result], device: torch.device, calls: int | None = None, seconds: float = math.inf
) -> tuple[Timing, Result]:
    """Time as `time_operation` does; also return the result of the last timed call: in a graph, of its last replay."""
    results: list[Result] = []

    def launch(index: int) -> None:
        results[:] = [operation(index)]

    timing = time_operation(launch, device, calls, seconds)
    return timing, results[0]


def largest(number: float, device: torch.device) -> float:
    """Return the largest of all ranks' numbers. Collective over the job."""
    largest = torch.tensor(number, device=device, dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def _capture(operation: Operation, calls: int) -> torch.cuda.CUDAGraph | None:
    """Return a graph of one sample; None, on every rank, where some rank cannot capture it."""
    is_free = True
    torch.cuda.synchronize()  # one stream at a time: the exchange counts its calls
    # The allocations of a first call on a new stream must not be part of the graph.
    with torch.cuda.stream(torch.cuda.Stream()):
        try:
            with error_on_host_sync():
                operation(0)
        except RuntimeError:
            is_free = False
    torch.cuda.synchronize()
    everywhere = torch.tensor(int(is_free), device="cuda")
    dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
    if not everywhere:
        return None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(calls):
            operation(index)
    torch.cuda.synchronize()
    return graph


def _graph_sampler(graph: torch.cuda.CUDAGraph) -> Callable[[], float]:
    def sample() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e3

    return sample


def _sampler(operation: Operation, calls: int, device: torch.device) -> Callable[[], float]:
    def sample() -> float:
        start = time.perf_counter()
        for index in range(calls):
            operation(index)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e6

    return sample
