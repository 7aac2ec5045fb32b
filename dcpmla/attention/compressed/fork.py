"""Work on a side stream, concurrent with the code after it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch


@contextmanager
def fork(device: torch.device, is_asked: bool) -> Iterator[Callable[[], None]]:
    """Run the body concurrently with the code after it, until the yielded join, which must be called.

    Both may read earlier results. The body must free its allocations, or return results in memory allocated before.
    Works inside the capture of a CUDA graph; without a GPU, or under torch.compile, the body runs first.

    Args:
        is_asked: Whether to run concurrently.
    """
    if device.type != "cuda" or not is_asked or torch.compiler.is_compiling():
        yield _nothing
        return
    current, side = torch.cuda.current_stream(device), _side_stream(device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        yield lambda: current.wait_stream(side)


def _nothing() -> None:
    pass


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one side stream of a device: each has memory of its own in the allocator."""
    return torch.cuda.Stream(device)
