"""Copies into the cache that a step waits for, layer by layer."""

import torch


class LayerLoads:
    """The copies into one layer's cache that have not been waited for."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []

    def add(self, event: torch.cuda.Event) -> None:
        """Add a copy, which ends with an event."""
        self._events.append(event)

    def wait(self) -> None:
        """Let the current stream wait for all copies; the host does not wait."""
        while self._events:
            torch.cuda.current_stream().wait_event(self._events.pop())
