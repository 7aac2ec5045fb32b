"""Drafts by prompt lookup: what followed the last tokens where they occurred before."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np

from dcpmla.runtime.drafts import Computed, Drafter, Drafts
from dcpmla.runtime.request import Request

_SHORTEST, _LONGEST = 3, 8  # tokens that must be the same, and that are looked at


class NgramDrafter(Drafter):
    """Drafts from a request's own tokens, of its prompt and new ones; no weights. For texts that repeat what the prompt
    says: code, quotations, answers from documents.

    Source: Saxena, Prompt Lookup Decoding.
    """

    def __init__(self, num_speculative_tokens: int) -> None:
        super().__init__(num_speculative_tokens)
        self._histories: WeakKeyDictionary[Request, _History] = WeakKeyDictionary()

    def draft(self, wanted: Sequence[tuple[Request, int]], computed: Sequence[Computed]) -> Drafts:
        """Guess that the longest match of the last tokens, the latest of the longest, goes on as it did."""
        return Drafts.of([self._following(request)[:num] if num else [] for request, num in wanted])

    def candidates(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Return those whose known tokens have a match, where one is under way: so probably will those with it."""
        return [request for request in requests if request.num_new_tokens and self._following(request)]

    def _following(self, request: Request) -> list[int]:
        history = self._histories.setdefault(request, _History(self.num_speculative_tokens))
        if len(history) < request.num_known_tokens:
            history.extend(request.tokens(len(history), request.num_known_tokens))
        return history.following


class _History:
    """All known tokens of a request, to search in.

    Attributes:
        following: num_tokens that may follow the last one, or none.
    """

    def __init__(self, num_tokens: int) -> None:
        self._memory = np.empty(0, dtype=np.int32)
        self._length, self._num_tokens = 0, num_tokens
        self.following: list[int] = []

    def __len__(self) -> int:
        return self._length

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens, and search for the last ones."""
        end = self._length + len(token_ids)
        if end > len(self._memory):
            memory = np.empty(2 * end, dtype=np.int32)
            memory[: self._length] = self._memory[: self._length]
            self._memory = memory
        self._memory[self._length : end] = token_ids
        self._length = end
        self.following = self._search()

    def _search(self) -> list[int]:
        """Return what followed the longest match. One that reaches the end goes round."""
        tokens = self._memory[: self._length]
        first = _SHORTEST - 1
        ends = (tokens[first:-1] == tokens[-1:]).nonzero()[0] + first
        for back in range(1, _LONGEST):
            longer = ends if back <= first else ends[ends >= back]
            longer = longer[tokens[longer - back] == tokens[-1 - back]] if longer.size else longer
            if not longer.size:
                if back <= first:
                    return []
                break
            ends = longer
            if back >= first and ends.size == 1:
                break
        period = self._length - 1 - int(ends[-1])
        found: list[int] = tokens[int(ends[-1]) + 1 + np.arange(self._num_tokens) % period].tolist()
        return found
