"""Cost of pieces of prompts in a step, and of loading cached blocks instead, for the scheduler."""

from collections.abc import Sequence
from typing import Protocol


class PieceCosts(Protocol):
    """The modelled time of pieces of prompts; `dcpmla.planning.prefill.PrefillCosts` is one.

    All results depend only on numbers that are the same on all ranks, never on a rank's clock.

    Attributes:
        max_prefill_us: Most microseconds that pieces of prompts take in a step in which requests decode.
        is_strict: Whether a step's first piece keeps to max_prefill_us even if it is too small to be useful.
        max_loss: Share of a useful piece's time that reading its context and its tokens again may take (`PieceSizes`).
        tokens_per_request: Width of the pieces that absorbed attention cuts requests into
            (`RouteCosts.tokens_per_request`).
        least_state_tokens: Tokens of a prompt from which on a piece may end only so that its state is remembered.
    """

    @property
    def max_prefill_us(self) -> float: ...

    @property
    def is_strict(self) -> bool: ...

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
    is_strict = False
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
