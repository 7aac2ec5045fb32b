"""A copy between the cache on a GPU and the host's memory, under way (`Copy`)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch


class Copy:
    """A copy under way on a stream of its own; a copy on the CPU has ended.

    Attributes:
        num_bytes: Bytes that it moves on this rank.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._started: torch.cuda.Event | None = None
        self._ended: torch.cuda.Event | None = None
        self._parts: list[tuple[int, torch.cuda.Event]] = []

    @contextmanager
    def on(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """Run what the block queues on a stream, after all work of the current one."""
        if stream is None:
            yield
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._started = stream.record_event(torch.cuda.Event(enable_timing=True))
            yield
            self._ended = stream.record_event(torch.cuda.Event(enable_timing=True))

    def end_part(self, last_layer: int) -> None:
        """Record that layers up to a number are copied; -1 for memory that all layers read."""
        if self._started is not None:
            self._parts.append((last_layer, torch.cuda.current_stream().record_event()))

    @property
    def is_done(self) -> bool:
        """Return whether it has ended."""
        return self._ended is None or self._ended.query()

    @property
    def has_failed(self) -> bool:
        """Return False: an error of the device ends the job."""
        return False

    @property
    def seconds(self) -> float:
        """Return the time that it took, once it has ended; 0 on the CPU."""
        if self._started is None or self._ended is None:
            return 0.0
        return self._started.elapsed_time(self._ended) / 1e3

    def wait(self) -> None:
        """Let the current stream wait for it. The host does not wait."""
        if self._ended is not None:
            torch.cuda.current_stream().wait_event(self._ended)

    def wait_by_layer(self, loads: Sequence[list[torch.cuda.Event]]) -> None:
        """Let each layer of the next step wait for its part, and the current stream for what all layers read.

        Args:
            loads: Lists of the layers (`Cache.loads`).
        """
        for layers, event in self._parts:
            if layers < 0:
                torch.cuda.current_stream().wait_event(event)
        ends = [-1, *(layer for layer, _ in self._parts if layer >= 0)]
        events = [event for layer, event in self._parts if layer >= 0]
        for (start, end), event in zip(pairwise(ends), events, strict=True):
            for layer in loads[start + 1 : end + 1]:
                layer.append(event)
        for layer in loads[ends[-1] + 1 :] if events else ():  # they read earlier layers' memory
            layer.append(events[-1])
