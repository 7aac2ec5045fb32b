"""Time to load blocks of the cache from host memory or disks, against the time to prefill their tokens again."""

from collections.abc import Callable

from dcpmla.cache.plan import CachePlan


class TierCosts:
    """The choice between loads into one rank's cache and prefills (`dcpmla.runtime.costs.LoadCosts`).

    A rank loads its own shard over its own link, at the same time as all others: W ranks that share a cache load W
    times as many tokens a second. All ranks compute the same times, because the sizes are equal on all ranks.

    Args:
        plan: Sizes of the cache; its number of blocks does not count.
        latency_us: Microseconds of a load, whatever it moves, the same on all ranks.
        gb_per_s: Rate at which a rank reads the tier, the same on all ranks.
        prefill_us: Function that returns the microseconds to prefill tokens after a context (`PrefillCosts.piece_us`).
        log: Function that is called with the number of tokens and both times where a prefill is chosen, or None.
    """

    def __init__(
        self,
        plan: CachePlan,
        latency_us: float,
        gb_per_s: float,
        prefill_us: Callable[[int, int], float],
        log: Callable[[int, float, float], None] | None = None,
    ) -> None:
        self._plan, self._latency_us, self._gb_per_s = plan, latency_us, gb_per_s
        self._prefill_us, self._log = prefill_us, log

    def load_bytes(self, num_tokens: int) -> int:
        """Return the bytes of so many tokens on one rank, in whole blocks, and of a request's state in a cache with
        states.
        """
        plan = self._plan
        return -(-num_tokens // plan.block_tokens) * plan.bytes_per_block + plan.bytes_per_state

    def load_us(self, num_tokens: int) -> float:
        """Return the microseconds to load so many tokens, and a request's state."""
        return self._latency_us + self.load_bytes(num_tokens) / self._gb_per_s / 1e3

    def should_load(self, num_tokens: int, context: int) -> bool:
        """Return whether it takes less time to load the tokens at positions [context, context + num_tokens) than to
        prefill them. In a cache with states, tokens are loaded with the state after them.
        """
        load_us, prefill_us = self.load_us(num_tokens), self._prefill_us(num_tokens, context)
        if load_us >= prefill_us and self._log is not None:
            self._log(num_tokens, load_us, prefill_us)
        return load_us < prefill_us
