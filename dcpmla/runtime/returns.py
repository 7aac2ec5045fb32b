"""Conversations that come back to contexts in the cache (`Returns`)."""

from collections import OrderedDict, deque
from collections.abc import Sequence

from dcpmla.cache.blocks import BlockAllocator

_MOST_LEFT = 4096  # contexts that are remembered
_NUM_GAPS, _SOON = 256, 0.9  # latest returns, and the part of them that counts as soon
_NUM_CAPACITIES = 16  # blocks of ended requests that weigh half as much as later ones, in sizes of the cache
_MOST_WORK = 10.0


class Returns:
    """Learns which part of the contexts are used again, and how soon.

    A prompt that the cache lacks evicts contexts. Those of conversations that come back are computed again, and evict
    others: of contexts of which the part r comes back, work w makes w (r + r^2 + ...) = w r / (1 - r) more work.

    Args:
        allocator: Blocks of the cache.
    """

    def __init__(self, allocator: BlockAllocator) -> None:
        self._allocator = allocator
        self._left: OrderedDict[bytes, tuple[float, int]] = OrderedDict()  # times and blocks, by a prompt's last key
        self._gaps: deque[float] = deque(maxlen=_NUM_GAPS)
        self._num_left = self._num_returned = 0.0  # blocks
        self._soon = 0.0

    def leave(self, keys: Sequence[bytes], now: float) -> None:
        """Note that the request with these blocks has ended: the full ones of its prompt."""
        if not keys:
            return
        self._left[keys[-1]] = now, len(keys)
        self._left.move_to_end(keys[-1])
        if len(self._left) > _MOST_LEFT:
            self._left.popitem(last=False)
        self._num_left += len(keys)
        if self._num_left > _NUM_CAPACITIES * self._allocator.num_blocks:
            self._num_left /= 2
            self._num_returned /= 2

    def come(self, keys: Sequence[bytes], now: float) -> None:
        """Note that a request with these blocks has arrived."""
        key = next((key for key in reversed(keys) if key in self._left), None)
        if key is None:
            return
        since, num_blocks = self._left.pop(key)
        self._num_returned += num_blocks
        self._gaps.append(now - since)
        self._soon = sorted(self._gaps)[int(_SOON * len(self._gaps))]

    def num_expected(self, now: float) -> int:
        """Return the blocks of contexts that are in the cache, and may come back soon."""
        num_expected = 0
        for key, (since, num_blocks) in reversed(self._left.items()):
            if now - since > self._soon:
                break
            num_expected += num_blocks if key in self._allocator else 0
        return num_expected

    @property
    def further_work(self) -> float:
        """Return the work that a unit of work causes by evicting contexts; at most 10."""
        if self._num_left < self._allocator.num_blocks:
            return 0.0
        share = min(self._num_returned / self._num_left, _MOST_WORK / (1 + _MOST_WORK))
        return share / (1 - share)
