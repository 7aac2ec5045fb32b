"""Reuse of computed blocks, and of states, among requests that begin with the same tokens.

If prompts that arrive together begin with the same blocks, one request computes them and the others find them.
"""

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dcpmla.cache.block_events import HOST
from dcpmla.cache.blocks import BlockAllocator
from dcpmla.cache.states import Worth
from dcpmla.cache.tier import HostTier
from dcpmla.runtime.block_events import stored_events
from dcpmla.runtime.costs import TOKEN_COSTS, LoadCosts
from dcpmla.runtime.progress import Loading
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


class Found(NamedTuple):
    """The computed beginning of a request.

    Attributes:
        blocks: Blocks of the cache.
        state: State in the cache after the last block; None in a cache without states, and if host memory has it.
        keys: Keys of the blocks after these, in host memory.
        state_key: Key of the state in host memory; None if the cache has it.
    """

    blocks: list[int]
    state: int | None = None
    keys: list[bytes] = []
    state_key: bytes | None = None

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks in both memories."""
        return len(self.blocks) + len(self.keys)


class StateCopy(NamedTuple):
    """A state that is worth a copy after the block of a key: to another state of the cache, if there is room."""

    source: int
    target: int | None
    key: bytes


class PrefixReuse:
    """The part of a scheduler that remembers blocks and finds them again, in the cache and in host memory.

    In a cache with states a prefix is reused only up to a remembered state. So pieces of prompts end on block borders
    where a state is worth a copy.

    Args:
        allocator: Blocks of the cache.
        is_enabled: Whether full blocks are remembered at all.
        tier: Content of host memory.
        costs, disk_costs: Costs of loads from host memory, and from disks, which are left out where computing is
            cheaper.
        least_state_tokens: Tokens from which on states within a prompt are worth a step (`PieceCosts`).
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        is_enabled: bool,
        tier: HostTier,
        costs: LoadCosts,
        disk_costs: LoadCosts = TOKEN_COSTS,
        least_state_tokens: int = TOKEN_COSTS.least_state_tokens,
    ) -> None:
        self._allocator, self._block_tokens, self.is_enabled = allocator, allocator.block_tokens, is_enabled
        self._tier, self._costs, self._disk_costs = tier, costs, disk_costs
        # None without states, and where nothing is reused.
        has_states = allocator.states.num_states > 0 and is_enabled
        self._forks = Forks(allocator.block_tokens, least_state_tokens) if has_states else None

    def add(self, request: Request) -> None:
        """Hash the blocks of a prompt on arrival, so that no step waits for the hashes of many long prompts."""
        if self.keys_of_prompt(request) and self._forks is not None:
            self._forks.add(request)

    def keys_of_prompt(self, request: Request) -> list[bytes]:
        """Return the keys of the full blocks of a prompt before its last token; none if nothing of it is reused."""
        if not self.is_enabled or request.is_scored:
            return []
        return request.block_keys(0, (len(request.prompt_token_ids) - 1) // self._block_tokens, self._block_tokens)

    def remove(self, request: Request) -> None:
        """Remove a request that has ended."""
        if self._forks is not None:
            self._forks.remove(request)

    def has_start(self, request: Request, num_tokens: int) -> bool:
        """Return whether the cache or host memory has the first tokens of a prompt, by the last of their blocks: the
        end of a sequence is evicted before its beginning.
        """
        num_blocks = -(-num_tokens // self._block_tokens)
        if not self.is_enabled or request.is_scored or num_blocks * self._block_tokens >= len(request.prompt_token_ids):
            return False
        (key,) = request.block_keys(num_blocks - 1, num_blocks, self._block_tokens)
        return key in self._allocator or key in self._tier.blocks

    def find(self, request: Request) -> Found:
        """Return the blocks that a request can reuse, and in a cache with states the state after them."""
        # The last token is always computed, because its logits are needed, and so is a scored prompt.
        if not self.is_enabled or request.is_scored:
            return Found([])
        keys = request.block_keys(0, (request.num_tokens - 1) // self._block_tokens, self._block_tokens)
        blocks = self._allocator.find(keys)
        num_in_host = self._tier.count(keys[len(blocks) :])
        found = self._best(keys, blocks, num_in_host)
        if self._forks is not None:
            if found.num_blocks < len(blocks) + num_in_host:
                self._forks.mark(keys[len(blocks) + num_in_host - 1])
            request.latest_key = keys[found.num_blocks - 1] if found.num_blocks else None
        self._tier.touch(keys[: found.num_blocks])
        return found

    def find_with_disk(self, request: Request, limit: int) -> Found | None:
        """Return what a waiting request could reuse if host memory had the disk's blocks and states, too; None unless
        that is worth the time to read them.

        Args:
            limit: Limit of the blocks that it could reuse from host memory.
        """
        if not self.is_enabled or request.is_scored:
            return None
        keys = request.block_keys(0, (request.num_tokens - 1) // self._block_tokens, self._block_tokens)
        blocks = self._allocator.find(keys)
        below = keys[len(blocks) :]
        found = self._best(keys, blocks, self._tier.count(below))
        read = self._reusable(keys, blocks, self._tier.count(below[:limit], with_disk=True), with_disk=True)
        return read if self._pays(self._disk_costs, read, found) else None

    def _best(self, keys: list[bytes], blocks: list[int], num_in_host: int) -> Found:
        """Return the blocks that a request can reuse: of the cache, and of host memory too if loading them pays."""
        found = self._reusable(keys, blocks, 0)
        loaded = self._reusable(keys, blocks, num_in_host)
        return loaded if self._pays(self._costs, loaded, found) else found

    def _reusable(self, keys: list[bytes], blocks: list[int], num_below: int, with_disk: bool = False) -> Found:
        """Return the blocks that a request can reuse, with states those up to the last one that has a state.

        Args:
            keys: Keys of all its full blocks.
            blocks: Remembered blocks of the cache, which come first.
            num_below: Number of blocks after these that host memory has; 0 also leaves out its states.
            with_disk: Whether num_below counts the disk's blocks, and its states count, too.
        """
        end = len(blocks) + num_below
        if self._forks is None:
            return Found(blocks, keys=keys[len(blocks) : end])
        known, state = self._allocator.with_state(blocks)
        for last in range(end, len(known), -1):
            if keys[last - 1] in self._tier.states or (with_disk and keys[last - 1] in self._tier.disk.states):
                return Found(blocks[:last], keys=keys[len(blocks) : last], state_key=keys[last - 1])
        return Found(known, state)

    def _pays(self, costs: LoadCosts, loaded: Found, found: Found) -> bool:
        """Return whether loading more blocks, and a state, is cheaper than computing their tokens again."""
        num_tokens = (loaded.num_blocks - found.num_blocks) * self._block_tokens
        return num_tokens > 0 and costs.should_load(num_tokens, found.num_blocks * self._block_tokens)

    def load(self, found: Found, blocks: Sequence[int], state: int | None) -> Loading:
        """Return the load of blocks that were found in host memory. They stay there until all ranks have loaded them.

        Args:
            blocks: All blocks of the request.
            state: State of the request.
        """
        self._tier.blocks.hold(found.keys)
        of_state = None
        if found.state_key is not None:
            assert state is not None
            self._tier.states.hold([found.state_key])
            of_state = found.state_key, state
        return Loading(found.keys, blocks[len(found.blocks) : found.num_blocks], of_state)

    def coming_blocks(self, prefills: Iterable[Request]) -> ComingBlocks:
        """Return the blocks that running requests whose prompts are not computed yet will remember."""
        coming = ComingBlocks(self._block_tokens)
        for request in prefills:
            self.add_coming(request, coming)
        return coming

    def add_coming(self, request: Request, coming: ComingBlocks) -> None:
        """Add the blocks that a running request will remember."""
        if self.is_enabled:
            coming.add(request, None if self._forks is None else self._forks.borders(request))

    def is_held(self, request: Request, coming: ComingBlocks) -> bool:
        """Return whether a waiting request finds more blocks if it waits for running ones."""
        num_coming = coming.find(request)
        if self._forks is None or not num_coming:
            return num_coming > 0  # without states, a block that is still to come is always one more
        keys = request.block_keys(num_coming - 1, (request.num_tokens - 1) // self._block_tokens, self._block_tokens)
        return not any(self._allocator.has_state(key) or key in self._tier.states for key in keys)

    def longest_piece(self, request: Request) -> int:
        """Return the number of a request's tokens to compute next, or up to the next border where its state is to be
        remembered.
        """
        borders = None if self._forks is None else self._forks.borders(request)
        if not borders:
            return request.longest_piece
        return borders[0] * self._block_tokens - request.num_computed_tokens

    def cut_piece(self, request: Request, num_tokens: int) -> int:
        """Return num_tokens of a piece, or up to half fewer so that it ends with a block, after which a state can be
        remembered.
        """
        if self._forks is None:
            return num_tokens
        num_over = (request.num_computed_tokens + num_tokens) % self._block_tokens
        return num_tokens - num_over if 2 * num_over < num_tokens else num_tokens

    def remember(self, request: Request) -> StateCopy | None:
        """Let requests that start with the same tokens find this one's full, computed blocks of known tokens.

        Returns:
            The copies of its state to make before the next step; None without one.
        """
        block_tokens, blocks = self._block_tokens, request.block_ids
        if not self.is_enabled or request.num_computed_tokens // block_tokens == request.num_remembered_blocks:
            return None
        num_known = min(request.num_computed_tokens, request.num_kept_tokens)
        start, end = request.num_remembered_blocks, num_known // block_tokens
        if end < start:  # It has found blocks of tokens that a stop string may still take back.
            return None
        new = list[int]()
        for index, key in enumerate(request.block_keys(start, end, block_tokens), start):
            if self._allocator.remember(blocks[index], key):
                new.append(index)
            self._tier.remember(blocks[index], key)
        if self._allocator.events is not None:
            self._allocator.events += stored_events(request, new, block_tokens)
        if self._tier.blocks.events is not None:
            for index in range(start, end):  # each block leaves host memory alone
                for event in stored_events(request, [index], block_tokens):
                    self._tier.announce(event._replace(medium=HOST))
        request.num_remembered_blocks = end
        if self._forks is None or num_known % block_tokens or num_known < request.num_computed_tokens:
            return None  # the state is the one after all tokens computed
        return self._remember_state(self._forks, request, start, end)

    def _remember_state(self, forks: Forks, request: Request, start: int, end: int) -> StateCopy | None:
        """Return the copies of a request's state after `end` blocks (`remember`), if the state is worth any: where
        sequences part, after all full blocks, and in a long prompt where the number of blocks has doubled.
        """
        assert request.state is not None
        (key,) = request.block_keys(end - 1, end, self._block_tokens)
        is_latest = end >= (len(request.prompt_token_ids) - 1) // self._block_tokens
        if is_latest and request.latest_key is not None:
            self._allocator.supersede_state(request.latest_key)
            self._tier.expire_state(request.latest_key)
        if is_latest:
            request.latest_key = key
        elif key not in forks and end.bit_length() == start.bit_length():
            return None
        worth = Worth.SHARED if key in forks else Worth.LATEST if is_latest else Worth.PASSED
        return StateCopy(request.state, self._allocator.remember_state(key, worth), key)
