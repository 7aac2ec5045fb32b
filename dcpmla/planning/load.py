"""Time to load blocks of the cache from host memory or disks, against the time to prefill their tokens again."""

from dcpmla.cache.plan import CachePlan
from dcpmla.planning.prefill import PrefillCosts

_LAUNCH_US = 10.0  # assumed, not measured: launches of a load in one layer, whatever it moves


class TierCosts:
    """The modelled time of loads into one rank's cache (`dcpmla.runtime.costs.LoadCosts`).

    A rank loads its own shard over its own link, at the same time as all others: W ranks that share a cache load W
    times as many tokens a second. All ranks compute the same times, because the sizes are equal on all ranks.

    Args:
        plan: Sizes of the cache; its number of blocks does not count.
        num_layers: Number of layers with a cache.
        gb_per_s: Rate at which a rank reads the tier (`Machine.host_gb_per_s`).
        pieces: Time of pieces of prompts.
    """

    def __init__(self, plan: CachePlan, num_layers: int, gb_per_s: float, pieces: PrefillCosts) -> None:
        self._plan, self._num_layers, self._gb_per_s, self._pieces = plan, num_layers, gb_per_s, pieces

    def load_bytes(self, num_tokens: int, with_state: bool) -> int:
        """Return the bytes of so many tokens on one rank, in whole blocks, plus a request's state."""
        plan = self._plan
        num_blocks = -(-num_tokens // plan.block_tokens)
        return num_blocks * plan.bytes_per_block + with_state * plan.bytes_per_state

    def load_us(self, num_tokens: int, with_state: bool) -> float:
        """Return the microseconds to load so many tokens, and a request's state."""
        return self._num_layers * _LAUNCH_US + self.load_bytes(num_tokens, with_state) / self._gb_per_s / 1e3

    def should_load(self, num_tokens: int, context: int) -> bool:
        """Return whether it takes less time to load the tokens at positions [context, context + num_tokens) than to
        prefill them. In a cache with states, tokens are loaded with the state after them.
        """
        with_state = self._plan.bytes_per_state > 0
        return self.load_us(num_tokens, with_state) < self._pieces.piece_us(num_tokens, context)
