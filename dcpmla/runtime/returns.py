"""Conversations that come back to contexts in the cache (`Returns`)."""

from collections import OrderedDict, deque
from collections.abc import Sequence

from dcpmla.cache.blocks import BlockAllocator

_MOST_LEFT = 4096  # contexts in the record, whether or not the cache still has them
# A return is soon if it takes no longer than this share of the latest returns.
_NUM_GAPS, _SOON = 256, 0.9
# Counts are halved once the blocks of ended requests are this many times the cache's, so later requests weigh more.
_NUM_CAPACITIES = 16
_BUSY_SECONDS = 60.0  # time constant of the share of time in which prompts are computed
_MOST_DELAY = 10.0


class Returns:
    """Estimates how often conversations use their contexts again, how soon, and what evicting some costs others.

    A context is the prompt of a request that has ended. A prompt that is not in the cache evicts contexts. If a share r
    of the contexts is used again, a computation of time t evicts contexts whose second computation takes r t. That one
    evicts contexts, too, so evictions make t (r + r^2 + ...) = t r / (1 - r) of work. Each prompt that waits then loses
    this time. If prompts are computed for a share b of the time, b^2 / (1 - b) prompts wait in the mean: a formula of
    queues (M/M/1). All of them together lose t r / (1 - r) b^2 / (1 - b).

    Args:
        allocator: Blocks of the cache.
    """

    def __init__(self, allocator: BlockAllocator) -> None:
        self._allocator = allocator
        self._left: OrderedDict[bytes, tuple[float, int]] = OrderedDict()  # seconds and blocks, by a prompt's last key
        self._gaps: deque[float] = deque(maxlen=_NUM_GAPS)
        self._num_left = self._num_returned = 0.0  # blocks
        self._soon = self._busy = self._now = 0.0

    def begin_step(self, now: float, was_busy: bool) -> None:
        """Count the time since the step before began.

        Args:
            now: Seconds, on a clock that all ranks share, as in `leave` and `come`.
            was_busy: Whether that step computed prompts that lacked more than little.
        """
        seconds, self._now = max(0.0, now - self._now), now
        self._busy += seconds / (seconds + _BUSY_SECONDS) * (was_busy - self._busy)

    def leave(self, keys: Sequence[bytes], now: float) -> None:
        """Record the end of a request.

        Args:
            keys: Keys of the full blocks of its prompt (`PrefixReuse.keys_of_prompt`).
            now: Seconds.
        """
        if not keys:
            return
        # Samples of one prompt leave one context.
        self._num_left += 0 if keys[-1] in self._left else len(keys)
        self._left[keys[-1]] = now, len(keys)
        self._left.move_to_end(keys[-1])
        if len(self._left) > _MOST_LEFT:
            self._left.popitem(last=False)
        if self._num_left > _NUM_CAPACITIES * self._allocator.num_blocks:
            self._num_left /= 2
            self._num_returned /= 2

    def come(self, keys: Sequence[bytes], now: float) -> None:
        """Record the arrival of a request, which uses the longest context that its prompt begins with (arguments of
        `leave`).
        """
        key = next((key for key in reversed(keys) if key in self._left), None)
        if key is None:
            return
        since, num_blocks = self._left.pop(key)
        self._num_returned += num_blocks
        self._gaps.append(now - since)
        self._soon = sorted(self._gaps)[int(_SOON * len(self._gaps))]

    def num_expected(self, now: float) -> int:
        """Return the number of blocks of the contexts in the cache that may be used again soon."""
        num_expected = 0
        for key, (since, num_blocks) in reversed(self._left.items()):
            if now - since > self._soon:
                break
            num_expected += num_blocks if key in self._allocator else 0
        return num_expected

    @property
    def delay(self) -> float:
        """Return r / (1 - r) b^2 / (1 - b), at most 10: what prompts lose by evictions of a computation, in times of
        that computation. It is 0 until requests with as many blocks as the cache has have ended.
        """
        if self._num_left < self._allocator.num_blocks:
            return 0.0
        further, waiting = (share / max(1 - share, 1e-6) for share in (self._num_returned / self._num_left, self._busy))
        return min(further * waiting * self._busy, _MOST_DELAY)
