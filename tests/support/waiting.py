"""Waits that end by a condition: a count of steps or a short time would be a bound that a busy machine breaks."""

import time
from collections.abc import Callable

LATE = 60  # seconds after which a test fails


def wait_until(condition: Callable[[], bool], words: str, pause: float = 0.05, late: float = LATE) -> None:
    """Call a condition until it holds.

    Args:
        words: What the failure says.
        pause: Seconds between two calls.
        late: Seconds after which the test fails.
    """
    until = time.monotonic() + late
    while not condition():
        assert time.monotonic() < until, words
        time.sleep(pause)
