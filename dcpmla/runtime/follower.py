"""The position of a request in its grammar."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLMatcher

Bits = np.ndarray[Any, np.dtype[np.uint32]]  # [words], a bit for each token, the lowest first


class Follower:
    """The position of a request in its grammar, on the first rank.

    Args:
        matcher: Matcher at the beginning of the grammar; None if it could not be compiled, for the reason `error`.
        eos_token_ids: End-of-sequence tokens.
        starts_after: Tokens after which the grammar begins (`Grammar.starts_after`).

    Attributes:
        error: Reason why the grammar cannot be followed; empty if it can.
    """

    def __init__(
        self, matcher: "LLMatcher | None", error: str, eos_token_ids: Sequence[int], starts_after: Sequence[int]
    ) -> None:
        self.matcher, self.error = matcher, error
        self._eos_token_ids, self._starts_after = list(eos_token_ids), list(starts_after)
        self._num_seen = 0  # new tokens that are known here
        self._has_begun = not starts_after

    def advance(self, token_ids: Sequence[int]) -> None:
        """Follow a request's new tokens. Tokens that it has followed before are skipped."""
        if not self._has_begun:
            start = self._begins(token_ids, self._num_seen)
            self._num_seen, self._has_begun = (len(token_ids), False) if start is None else (start, True)
        new = list(token_ids[self._num_seen :])
        self._num_seen = len(token_ids)
        if new and self.matcher is not None:
            self.matcher.consume_tokens(new)
            self.check()

    def check(self) -> None:
        """Set the error if the matcher has failed: it then goes on as if the grammar were complete."""
        if self.matcher is not None and self.matcher.is_error():
            self.error = self.error or self.matcher.get_error()

    def num_free(self, token_ids: Sequence[int], drafts: Sequence[int]) -> int:
        """Return how many of a step's choices come before the grammar begins: one follows the known tokens, and one
        each draft.
        """
        if self._has_begun:
            return 0
        start = self._begins([*token_ids, *drafts], len(token_ids))
        return 1 + len(drafts) if start is None else start - len(token_ids)

    def finish(self, bits: Bits, stop_token_ids: Sequence[int], is_free: bool, is_short: bool) -> None:
        """Complete the mask of a choice: tokens that end the request are allowed where the grammar may end.

        Args:
            bits: Tokens that the grammar allows, in place; all before it begins.
            is_free: Whether the choice comes before the grammar begins. No token may end the request there.
            is_short: Whether the request must not end yet. It ends where nothing else is left.
        """
        may_end = not is_free and any(_has(bits, token) for token in self._eos_token_ids)
        ends = [token for token in {*self._eos_token_ids, *stop_token_ids} if token < 32 * len(bits)]
        before = bits.copy()
        for token in ends:
            bits[token >> 5] &= ~np.uint32(1 << (token & 31))
        if may_end and not (is_short and bits.any()):
            for token in ends:
                bits[token >> 5] |= np.uint32(1 << (token & 31))
        elif not bits.any():
            bits[:] = before  # nothing but a stop token goes on with the text
        if not bits.any():
            self.error = self.error or "no token of the vocabulary continues it"

    def _begins(self, token_ids: Sequence[int], first: int) -> int | None:
        """Return the number of tokens before the grammar's first one, None if it has not begun.

        Args:
            first: Number of tokens in which it is known not to have begun.
        """
        length = len(self._starts_after)
        for end in range(max(first + 1, length), len(token_ids) + 1):
            if list(token_ids[end - length : end]) == self._starts_after:
                return end
        return None


def _has(bits: Bits, token: int) -> bool:
    return token < 32 * len(bits) and bool(bits[token >> 5] >> np.uint32(token & 31) & np.uint32(1))
