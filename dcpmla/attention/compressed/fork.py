"""Work on a side stream, beside what follows it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch


@contextmanager
def fork(device: torch.device, is_asked: bool) -> Iterator[Callable[[], None]]:
    """Run the body beside what follows it, until the join that is yielded, which has to be called.

    Both may read what came before. The body frees what it allocates, or hands it on in memory that was there. Works
    inside the capture of a CUDA graph; where there is no GPU, or under torch.compile, one follows the other.

    Args:
        is_asked: False for one after the other, too.
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
