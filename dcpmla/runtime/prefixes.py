"""Shared prefixes: if prompts begin with the same blocks, one request computes them and the others find them."""

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterable

from dcpmla.runtime.request import Request

_MOST_FORKS = 4096  # borders that are known at a time


class Forks:
    """The block borders at which prompts part, where the state of a request is worth a copy (caches with states).

    A prefix is reused only up to a remembered state. Prompts that wait or run at the same time are compared on arrival.
    A prompt parts from an earlier one after the last block that it finds without a state.

    The first does not know where they will part, so its state is also worth a copy wherever its number of blocks has
    doubled: the second prompt reuses at least half of the shared blocks.

    Args:
        block_tokens: Tokens of a block.
        least_tokens: Tokens from which on doubled numbers of blocks are borders (`PieceCosts.least_state_tokens`).
    """

    def __init__(self, block_tokens: int, least_tokens: int) -> None:
        self._block_tokens, self._least_tokens = block_tokens, least_tokens
        self._live: Counter[bytes] = Counter()  # keys of the full blocks of prompts that wait or run
        self._prompts: dict[Request, list[bytes]] = {}
        self._forks: OrderedDict[bytes, None] = OrderedDict()

    def add(self, request: Request) -> None:
        """Compare a new request's prompt with all prompts that wait or run, and add it."""
        keys = request.block_keys(0, (len(request.prompt_token_ids) - 1) // self._block_tokens, self._block_tokens)
        num_shared = bisect_left(keys, True, key=lambda key: not self._live[key])
        if num_shared:
            self.mark(keys[num_shared - 1])
        self._live.update(keys)
        self._prompts[request] = keys

    def remove(self, request: Request) -> None:
        """Remove a request that has ended, if it was added."""
        for key in self._prompts.pop(request, ()):
            self._live[key] -= 1
            if not self._live[key]:
                del self._live[key]

    def mark(self, key: bytes) -> None:
        """Note that sequences part after the block of a key. The border that was noted first is forgotten first."""
        self._forks[key] = None
        self._forks.move_to_end(key)
        if len(self._forks) > _MOST_FORKS:
            self._forks.popitem(last=False)

    def __contains__(self, key: bytes) -> bool:
        return key in self._forks

    def borders(self, request: Request) -> list[int]:
        """Return the numbers of blocks after which a running request will remember its state: those where it parts from
        others, powers of two, and all.
        """
        first = request.num_computed_tokens // self._block_tokens
        # A preempted request's tokens are a prompt's again.
        last = (request.num_known_tokens - 1) // self._block_tokens
        if last <= first:
            return []
        keys = request.block_keys(first, last, self._block_tokens) if self._forks else []
        forks = [first + index for index, key in enumerate(keys, 1) if key in self._forks]
        powers = [1 << exponent for exponent in range(first.bit_length(), last.bit_length())]
        return sorted({*forks, *(n for n in powers if n * self._block_tokens >= self._least_tokens), last})


class ComingBlocks:
    """The blocks that running requests will remember next, against which waiting requests are checked.

    A request shares a block exactly if it has the same key at the same index. So one key per running request decides
    whether there is anything to wait for, however long the prompts are; with states, a key for each border.

    Args:
        block_tokens: Tokens of a block.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._keys: dict[int, set[bytes]] = {}  # block's index in its sequence -> keys

    def add(self, request: Request, borders: Iterable[int] | None = None) -> None:
        """Add a running request whose prompt is not computed yet.

        Args:
            borders: Numbers of blocks after which it will remember its state; None without states.
        """
        if borders is None:
            num_blocks = len(request.prompt_token_ids) // self._block_tokens
            borders = range(request.num_remembered_blocks + 1, num_blocks + 1)[:1]
        for border in borders:
            self._keys.setdefault(border - 1, set()).add(self._key(request, border - 1))

    def find(self, request: Request) -> int:
        """Return how many blocks a waiting request will find if it waits, 0 for none that are coming. Scored prompts do
        not reuse any.
        """
        num_blocks = (len(request.prompt_token_ids) - 1) // self._block_tokens  # the last token is always computed
        if request.is_scored:
            return 0
        ends = (i + 1 for i, keys in self._keys.items() if i < num_blocks and self._key(request, i) in keys)
        return max(ends, default=0)

    def _key(self, request: Request, index: int) -> bytes:
        return request.block_keys(index, index + 1, self._block_tokens)[0]
