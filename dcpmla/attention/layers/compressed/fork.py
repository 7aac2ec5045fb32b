"""Work on a side stream, concurrent with the code after it."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


class Fork:
    """Work that may run on a side stream.

    Args:
        current, side: The stream that goes on, and the side stream; None if the work has run already.
    """

    def __init__(self, current: torch.cuda.Stream | None = None, side: torch.cuda.Stream | None = None) -> None:
        self._current, self._side = current, side
        self._mark: torch.cuda.Event | None = None

    def mark(self) -> None:
        """Mark this point of the work."""
        if self._side is not None:
            self._mark = self._side.record_event()

    def reach_mark(self) -> None:
        """Make the code after this wait for the work up to its mark, if it has one."""
        if self._current is not None and self._mark is not None:
            self._current.wait_event(self._mark)

    def join(self) -> None:
        """Make the code after this wait for the whole work."""
        if self._current is not None and self._side is not None:
            self._current.wait_stream(self._side)


@contextmanager
def fork(device: torch.device, is_asked: bool) -> Iterator[Fork]:
    """Run the body concurrently with the code after it, until `join` of the yielded fork, which must be called.

    Both may read earlier results. The body must free its allocations, or return results in memory allocated before.
    Works inside the capture of a CUDA graph; without a GPU, or under torch.compile, the body runs first.

    Args:
        is_asked: Whether to run concurrently.
    """
    if device.type != "cuda" or not is_asked or torch.compiler.is_compiling():
        yield Fork()
        return
    current, side = torch.cuda.current_stream(device), _side_stream(device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        yield Fork(current, side)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one side stream of a device: each has memory of its own in the allocator. Its small kernels
    come before large ones that start at the same time.
    """
    return torch.cuda.Stream(device, priority=-1)
