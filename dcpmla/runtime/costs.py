"""Cost of pieces of prompts in a step, and of loading cached blocks instead, for the scheduler."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol

_LEAST_TOKENS = 64  # smallest piece, at any cost of its context, so that every step advances a prompt


class PieceCosts(Protocol):
    """The modelled time of pieces of prompts; `dcpmla.planning.prefill.PrefillCosts` is one.

    All results depend only on numbers that are the same on all ranks, never on a rank's clock.

    Attributes:
        max_prefill_us: Most microseconds that pieces of prompts take in a step in which requests decode.
        max_loss: Share of a piece's time that reading its context again may take. Where max_prefill_us leaves less time
            than that, a step's first piece exceeds it; inf if it never may.
        tokens_per_request: Width of the pieces that absorbed attention cuts requests into
            (`RouteCosts.tokens_per_request`).
        least_state_tokens: Tokens of a prompt from which on a piece may end only so that its state is remembered.
    """

    @property
    def max_prefill_us(self) -> float: ...

    @property
    def max_loss(self) -> float: ...

    @property
    def tokens_per_request(self) -> int: ...

    @property
    def least_state_tokens(self) -> int: ...

    def piece_us(self, new: int, context: int) -> float:
        """Return the microseconds that a piece of `new` tokens after `context` tokens adds to a step."""

    def choose_absorbed(self, pieces: Sequence[tuple[int, int]]) -> list[bool]:
        """Return which pieces (new tokens, tokens before them) attend with absorbed queries."""

    def absorbs_all(self, pieces: Sequence[tuple[int, int]]) -> bool:
        """Return whether a step is faster as one graph, in which all pieces attend with absorbed queries."""


class LoadCosts(Protocol):
    """The choice between loading blocks from a slower tier of the cache and prefilling their tokens again;
    `dcpmla.planning.load.TierCosts` is one. It depends only on numbers that are the same on all ranks.
    """

    def should_load(self, num_tokens: int, context: int) -> bool:
        """Return whether to load the tokens at positions [context, context + num_tokens), not to prefill them."""


class TokenCosts:
    """Cost model of equal tokens: only their number bounds a step, all pieces attend by MHA, and every load pays."""

    max_prefill_us = max_loss = float("inf")
    tokens_per_request = least_state_tokens = 1

    def piece_us(self, new: int, context: int) -> float:
        """Return the number of new tokens."""
        return float(new)

    def choose_absorbed(self, pieces: Sequence[tuple[int, int]]) -> list[bool]:
        """Return False for each piece."""
        return [False] * len(pieces)

    def absorbs_all(self, pieces: Sequence[tuple[int, int]]) -> bool:
        """Return False."""
        return False

    def should_load(self, num_tokens: int, context: int) -> bool:
        """Return True."""
        return True


TOKEN_COSTS = TokenCosts()


def piece_tokens(costs: PieceCosts, context: int, limit: int, room_us: float) -> int:
    """Return the size of the next piece after a context: the new tokens, at most `limit`, that fit into room_us, but at
    least _LEAST_TOKENS. A step's first piece gets more room where `PieceCosts.max_loss` asks for it.
    """

    def piece_us(new: int) -> float:
        return costs.piece_us(new, context)

    if limit <= _LEAST_TOKENS or piece_us(limit) <= room_us:
        return limit
    if room_us >= costs.max_prefill_us:
        half = limit // 2
        cut_us = piece_us(half) + costs.piece_us(limit - half, context + half) - piece_us(limit)
        room_us = max(room_us, cut_us / costs.max_loss)
    return max(bisect_right(range(1, limit + 1), room_us, key=piece_us), _LEAST_TOKENS)
