"""A line of the log on a server's load, from its metrics (`Throughput`)."""

import time
from collections.abc import Callable

from dcpmla.serving.metrics import Metrics

_TOTALS = ("prompt_tokens", "cached_prompt_tokens", "generation_tokens", "preemptions")


class Throughput:
    """The load of a server since its last line.

    Args:
        clock: Function that returns the time in seconds.
    """

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics, self._clock = metrics, clock
        self._last, self._totals = clock(), dict.fromkeys(_TOTALS, 0.0)

    def line(self) -> str:
        """Return the rates since the last call and the state now; empty if the server was idle, and is."""
        now, values = self._clock(), self._metrics.values()
        totals = {name: values[name] for name in _TOTALS}
        seconds, (num_prompt, num_cached, num_new, num_preemptions) = (
            now - self._last,
            (totals[name] - self._totals[name] for name in _TOTALS),
        )
        self._last, self._totals = now, totals
        running, waiting = int(values["requests_running"]), int(values["requests_waiting"])
        if not (num_prompt or num_new or running or waiting):
            return ""
        return (
            f"prompts {num_prompt / seconds:,.1f} tokens/s"
            f"{f' ({num_cached / num_prompt:.0%} found in the cache)' if num_prompt else ''}, "
            f"new {num_new / seconds:,.1f} tokens/s; {running:,} running, {waiting:,} waiting, "
            f"cache {values['kv_cache_use']:.1%} used, {num_preemptions:.0f} preemptions"
        )
