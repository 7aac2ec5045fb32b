"""The states that vLLM's scheduler remembers, so that a request can continue from one. Nothing here imports vLLM."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from dcpmla.cache.states import StatePool, Worth, num_states


def num_remembered(vllm_config: Any) -> int:
    """Return the number of states in the cache besides one for each running request; 0 without prefix caching."""
    num_running: int = vllm_config.scheduler_config.max_num_seqs
    return num_states(num_running) - num_running if vllm_config.cache_config.enable_prefix_caching else 0


class StateCopies(NamedTuple):
    """Copies of states around a step, by the id of the request.

    Attributes:
        before: Remembered state that replaces the request's before the step.
        after: Remembered state that the request's replaces after the step.
    """

    before: dict[str, int]
    after: dict[str, int]


class RememberedStates:
    """The remembered states, each after a block of some tokens.

    A request of vLLM has a hash for each full block, made from all tokens up to the block's end. A state can be
    remembered before the hash is known, while the block's last token is sampled.

    Args:
        num_states: Number of states to remember at a time.
        block_tokens: Tokens of a block.
    """

    def __init__(self, num_states: int, block_tokens: int) -> None:
        self.block_tokens, self._num_states = block_tokens, num_states
        self.clear()

    def clear(self) -> None:
        """Forget all states."""
        self._pool = StatePool(self._num_states)
        self._num_contents = 0
        self._contents = dict[bytes, int]()  # hash of a block -> number of its content in the pool
        self._unnamed = list[tuple[Any, int, int]]()  # request, its number of blocks, number of the content
        self._latest = dict[str, int]()  # id of a request -> content after which it has its latest state

    def find(self, hashes: Sequence[bytes], num_blocks: int) -> int:
        """Return after how many of the first blocks a request can continue; 0 for none."""
        self._name()
        return next((end for end in range(num_blocks, 0, -1) if self._has_state(hashes[end - 1])), 0)

    def restore(self, request: Any, num_blocks: int) -> int:
        """Return the state after num_blocks of a request's blocks (`find`)."""
        content = self._contents[request.block_hashes[num_blocks - 1]]
        self._latest[request.request_id] = content
        state = self._pool.find(content)
        assert state is not None
        return state

    def next_stop(self, request: Any, start: int, num_tokens: int) -> int:
        """Return how many of num_tokens of a request to compute next, so that a state is worth remembering after them.

        Args:
            start: Tokens computed before.
        """
        last, end = (request.num_tokens - 1) // self.block_tokens * self.block_tokens, start + num_tokens
        if start >= last:
            return num_tokens
        stops = [stop for stop in (request.shared_prefix_boundary, last) if start < stop < end]
        if stops:
            return min(stops) - start
        # Up to half fewer, so that the piece ends with a block.
        num_over = end % self.block_tokens
        return num_tokens - num_over if 2 * num_over < num_tokens else num_tokens

    def remember(self, request: Any, start: int, end: int) -> int | None:
        """Return a state for a copy of a request's state after the step that computes its tokens from start to end, or
        None. A state is worth a copy where sequences part, after all full blocks of the prompt, after each block of the
        answer, and in a long prompt where the number of blocks has doubled.
        """
        self._name()
        first, last = start // self.block_tokens, end // self.block_tokens
        if end % self.block_tokens or end == start:
            return None
        is_shared, is_latest = end == request.shared_prefix_boundary, end >= request.num_tokens - self.block_tokens
        if not (is_shared or is_latest or last.bit_length() > first.bit_length()):
            return None
        if last <= len(request.block_hashes) and self._has_state(request.block_hashes[last - 1]):
            content = self._contents[request.block_hashes[last - 1]]
        else:
            content = self._num_contents = self._num_contents + 1
            self._unnamed.append((request, last, content))
        if is_latest:
            previous = self._latest.get(request.request_id, content)
            if previous != content:
                self._pool.supersede(previous)
            self._latest[request.request_id] = content
        return self._pool.remember(content, Worth.SHARED if is_shared else Worth.LATEST if is_latest else Worth.PASSED)

    def forget_request(self, request_id: str) -> None:
        """Note that a request has ended. Its states stay."""
        self._latest.pop(request_id, None)

    def _has_state(self, block_hash: bytes) -> bool:
        content = self._contents.get(block_hash)
        return content is not None and content in self._pool

    def _name(self) -> None:
        """Look up the hashes of blocks that have become known since their states were remembered."""
        unknown = list[tuple[Any, int, int]]()
        for request, num_blocks, content in self._unnamed:
            if content not in self._pool:
                continue
            if num_blocks <= len(request.block_hashes):
                block_hash = request.block_hashes[num_blocks - 1]
                if block_hash in self._contents:
                    self._pool.forget(self._contents[block_hash])
                self._contents[block_hash] = content
            elif request.is_finished():
                self._pool.forget(content)  # its last token will never be known
            else:
                unknown.append((request, num_blocks, content))
        self._unnamed = unknown
        if len(self._contents) > 4 * self._num_states:
            self._contents = {key: content for key, content in self._contents.items() if content in self._pool}
