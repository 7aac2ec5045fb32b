"""Totals of the hot rows that steps have found and fetched (`HotCounts`)."""

from torch import Tensor

from dcpmla.runtime.host_copy import HostCopy

_COLUMNS = {1: "hit", 2: "miss"}  # of `HotSet.counts`


class HotCounts:
    """The counts of each layer's hot rows on this rank, at most a few steps old.

    Args:
        counts: `Cache.hot_counts`, which steps increase.
    """

    def __init__(self, counts: Tensor) -> None:
        self._counts = counts
        self._copy, self._totals = HostCopy(counts.flatten()), [0] * counts.numel()

    def totals(self) -> dict[tuple[str, str], int]:
        """Return the selected rows that were hot, "hit", and the rows that were fetched, "miss", by the layer's number.
        Nothing waits for the device.
        """
        if self._copy.is_done:
            self._totals = self._copy.wait()
            self._copy = HostCopy(self._counts.flatten())
        width = self._counts.shape[1]
        return {
            (str(layer), name): self._totals[layer * width + column]
            for layer in range(len(self._counts))
            for column, name in _COLUMNS.items()
        }
