"""Lines of the log that clients without a key can cause: few of each kind in a minute, then their number."""

import logging
import time
from collections import Counter
from collections.abc import Callable

_MINUTE = 60.0  # seconds
_MOST = 10  # lines of a kind in a minute
_MOST_CHARACTERS = 80
_logger = logging.getLogger(__name__)


class FewLines(logging.Filter):
    """The first lines of each kind in each minute, and a count of the others, so that no client can fill a disk.

    As a filter of a logger, a kind is its lines with the same text before arguments are filled in.

    Args:
        clock: Function that returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock, self._start, self._num_lines = clock, clock(), Counter[str]()

    def admits(self, kind: str) -> bool:
        """Count a line of a kind, and return whether it is one of the minute's first."""
        self.tell()
        self._num_lines[kind] += 1
        return self._num_lines[kind] <= _MOST

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a logger's line is written."""
        return self.admits(str(record.msg).strip().rstrip(".")[:_MOST_CHARACTERS])

    def tell(self) -> None:
        """Once a minute is over, log how many lines of each kind it left out, and begin the next one."""
        if self._clock() < self._start + _MINUTE:
            return
        counts, self._num_lines, self._start = self._num_lines, Counter(), self._clock()
        for kind, number in counts.items():
            if number > _MOST:
                _logger.info("%s: %s more within a minute", kind, f"{number - _MOST:,}")
