"""A copy between the cache on a GPU and the host's memory, queued part by part (`Copy`)."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch

# Iterator that queues a part of a copy at each step, and yields the last layer that is complete with it: -1 where the
# part belongs to all layers, None where its layer is not complete.
Parts = Iterator[int | None]


class Copy:
    """A copy on a stream of its own, after all work that is queued on the current stream; on the CPU it runs at once.

    Args:
        parts: Parts of the copy; None for a copy of nothing.
        stream: Stream of the copy; None on the CPU.
        num_bytes: Bytes that it moves on this rank.
    """

    def __init__(self, parts: Parts | None = None, stream: torch.cuda.Stream | None = None, num_bytes: int = 0) -> None:
        self.num_bytes, self._parts, self._stream = num_bytes, iter(parts or ()), stream
        self._layers: list[tuple[int, torch.cuda.Event]] = []
        self._started: torch.cuda.Event | None = None
        self._ended: torch.cuda.Event | None = None  # set when all parts are queued
        if stream is None:
            for _ in self._parts:
                pass
        else:
            stream.wait_stream(torch.cuda.current_stream())
            self._started = stream.record_event(torch.cuda.Event(enable_timing=True))

    def queue_part(self) -> torch.cuda.Event | None:
        """Queue the next part; return an event after it, or None if all are queued."""
        if self._stream is None or self._ended is not None:
            return None
        with torch.cuda.stream(self._stream):
            try:
                layer = next(self._parts)
            except StopIteration:
                self._ended = self._stream.record_event(torch.cuda.Event(enable_timing=True))
                return None
            event = self._stream.record_event()
        if layer is not None:
            self._layers.append((layer, event))
        return event

    def queue(self) -> None:
        """Queue all parts."""
        while self.queue_part() is not None:
            pass

    @property
    def is_done(self) -> bool:
        """Return whether it has ended."""
        return self._stream is None or (self._ended is not None and self._ended.query())

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

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """Queue all parts, and let a stream, by default the current one, wait for them. The host does not wait."""
        self.queue()
        if self._ended is not None:
            (stream or torch.cuda.current_stream()).wait_event(self._ended)

    def cancel(self) -> None:
        """Leave out the parts that are not queued, and let the current stream wait for the others."""
        self._parts = iter(())
        self.wait()

    def wait_by_layer(self, loads: Sequence[list[torch.cuda.Event]]) -> None:
        """Queue all parts. Each layer of the next step waits for its part; the current stream waits for the parts that
        all layers read.

        Args:
            loads: Lists of the layers (`Cache.loads`).
        """
        self.queue()
        for layer, event in self._layers:
            if layer < 0:
                torch.cuda.current_stream().wait_event(event)
        ends = [-1, *(layer for layer, _ in self._layers if layer >= 0)]
        events = [event for layer, event in self._layers if layer >= 0]
        for (start, end), event in zip(pairwise(ends), events, strict=True):
            for events_of_layer in loads[start + 1 : end + 1]:
                events_of_layer.append(event)
        for events_of_layer in loads[ends[-1] + 1 :] if events else ():  # they read earlier layers' memory
            events_of_layer.append(events[-1])
