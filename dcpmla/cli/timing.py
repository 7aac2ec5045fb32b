"""How long an operation takes on all ranks: in a CUDA graph where one can be captured, else call by call."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from dcpmla.runtime.capture import capturing, error_on_host_sync, forget_capture

Operation = Callable[[int], object]  # called with 0, 1, 2 ... so that it can rotate its inputs
CALLS_PER_SAMPLE = 16
_NUM_WARM_UPS = 3
_FEWEST_SAMPLES = 5


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: the median over samples, the slowest rank's."""

    median_us: float
    in_graph: bool


class TimeLimit:
    """Ends a benchmark between two measurements, on all ranks at once."""

    def __init__(self, seconds: float, device: torch.device) -> None:
        self._end, self._device = time.monotonic() + seconds, device

    def is_over(self) -> bool:
        """Whether some rank's clock says so. Collective over the job."""
        return _largest(float(time.monotonic() >= self._end), self._device) > 0


def time_operation(
    operation: Operation, device: torch.device, calls: int = CALLS_PER_SAMPLE, num_samples: int = 30, seconds: float = math.inf
) -> Timing:
    """Time an operation of all ranks. Collective over the job.

    Args:
        calls: operation(0) ... operation(calls - 1) are one sample.
        num_samples: fewer, but at least 5, where they would take more than so many seconds.
    """
    for index in range(_NUM_WARM_UPS):
        operation(index % calls)
    graph = _capture(operation, calls, device) if device.type == "cuda" else None
    run = partial(_call_all, operation, calls) if graph is None else graph.replay
    sample = partial(_time_by_events if device.type == "cuda" else _time_by_clock, run)
    first = _largest(sample(), device)  # a graph's first replay is slower: it only says how many samples there is time for
    times = []
    for _ in range(int(min(num_samples, max(_FEWEST_SAMPLES, seconds * 1e6 / first)))):
        dist.barrier()
        times.append(sample() / calls)
    return Timing(_largest(statistics.median(times), device), graph is not None)


def _largest(number: float, device: torch.device) -> float:
    """Of all ranks' numbers. Collective over the job."""
    largest = torch.tensor(number, device=device, dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def _capture(operation: Operation, calls: int, device: torch.device) -> torch.cuda.CUDAGraph | None:
    """A graph of one sample; None, on every rank, where some rank cannot capture it. Collective over the job."""
    stream, graph, pool = torch.cuda.Stream(), torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()

    def call_watched() -> None:
        with torch.cuda.stream(stream), error_on_host_sync():  # what a first call on a stream allocates must not be part of the graph
            operation(0)

    def capture() -> None:
        try:
            with capturing(graph, stream, pool):
                _call_all(operation, calls)
        except RuntimeError:
            forget_capture(pool)
            raise

    return graph if _succeeds(call_watched, device) and _succeeds(capture, device) else None


def _succeeds(attempt: Callable[[], None], device: torch.device) -> bool:
    """Whether it does on every rank. Collective over the job."""
    has_failed = False
    try:
        attempt()
    except RuntimeError:
        has_failed = True
    torch.cuda.synchronize()
    return not _largest(float(has_failed), device)


def _call_all(operation: Operation, calls: int) -> None:
    for index in range(calls):
        operation(index)


def _time_by_events(run: Callable[[], object]) -> float:
    """Microseconds on the GPU, gaps between its kernels included, but not the host's wait for the last one."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3


def _time_by_clock(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e6
