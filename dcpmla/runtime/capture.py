"""What every capture of a CUDA graph needs: a watch for waits before it, the streams around it, an end to one that broke off."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch


@contextmanager
def error_on_host_sync() -> Iterator[None]:
    """A RuntimeError from whatever waits for the GPU: a graph cannot hold it, and breaking a capture spoils torch's allocator."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any) -> Iterator[None]:
    """Capture what the block launches, on that stream.

    Raises:
        RuntimeError: the capture broke off; the block's own error, where it had one, is the context.
    """
    # The outer context gives the old stream back even if the capture breaks off. What other threads do, NCCL's and the
    # watchdog's, does not touch the capture: hence thread_local.
    with torch.cuda.stream(stream), torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        yield


def forget_capture(pool: Any) -> None:
    """Make torch usable after a capture into that pool, on the current device, that broke off.

    CUDA has ended it, torch 2.11 has not: its allocator would refuse the next capture and `empty_cache`, its random numbers whatever is
    outside of a capture. Memory that the capture took is not given back.
    """
    device = torch.cuda.current_device()
    with suppress(RuntimeError):  # later versions have ended it themselves
        torch._C._cuda_endAllocateToPool(device, pool)
    generator = torch.cuda.default_generators[device]
    generator.graphsafe_set_state(generator.clone_state())  # the same seed and offset, but in no capture
