"""Prompts of the latest requests on a rank: a conversation's next turn has the keys of their blocks already."""

from collections import deque

import numpy as np

from dcpmla.runtime.request import Prompt

_KEPT_TOKENS = 1 << 23  # 64 MiB
_FIRST_TOKENS = 1 << 12  # compared at first, then twice as many each time


class KnownPrompts:
    """The prompts of the latest requests, within a limit of tokens.

    A key is taken only for tokens that were compared, so a client can name no block that it does not have the text of.

    Args:
        block_tokens: Tokens of a block, over all DCP ranks.
        num_tokens: Limit of the tokens of all prompts.
    """

    def __init__(self, block_tokens: int, num_tokens: int = _KEPT_TOKENS) -> None:
        self._block_tokens, self._limit, self._num_tokens = block_tokens, num_tokens, 0
        self._prompts = deque[Prompt]()  # the oldest first

    def add(self, prompt: Prompt) -> None:
        """Give a prompt, an array of int64, the known keys of its first blocks, and keep it."""
        best, num_common = None, 0
        for known in self._prompts:
            if known.cache_salt == prompt.cache_salt and (num := _num_common(known, prompt)) > num_common:
                best, num_common = known, num
        if best is not None:
            prompt.block_keys[:] = best.block_keys[: num_common // self._block_tokens]
            if num_common == len(best.token_ids):  # The new prompt has all of it.
                self._prompts = deque(each for each in self._prompts if each is not best)
                self._num_tokens -= num_common
        self._prompts.append(prompt)
        self._num_tokens += len(prompt.token_ids)
        while self._num_tokens > self._limit:
            self._num_tokens -= len(self._prompts.popleft().token_ids)


def _num_common(first: Prompt, second: Prompt) -> int:
    """Return the number of tokens that two prompts begin with."""
    tokens = [np.asarray(each.token_ids) for each in (first, second)]
    length, start, size = min(map(len, tokens)), 0, _FIRST_TOKENS
    while start < length:
        one, other = (each[start : min(start + size, length)] for each in tokens)
        if (differs := one != other).any():
            return start + int(differs.argmax())
        start, size = start + size, 2 * size
    return length
