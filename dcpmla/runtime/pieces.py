"""Sizes of the pieces that the scheduler cuts prompts into, by modelled times."""

from bisect import bisect_left, bisect_right
from typing import NamedTuple

from dcpmla.runtime.costs import PieceCosts
from dcpmla.runtime.graph_sizes import mixed_sizes

_LEAST_TOKENS = 64  # least of a step's first piece under a strict limit, so that every step advances a prompt


class Room(NamedTuple):
    """Room of a step for a piece of a prompt.

    Attributes:
        num_before: Tokens that the step has so far.
        limit: Most tokens of the piece.
        us: Microseconds that the piece may take (`PieceCosts.piece_us`).
        is_first: Whether the step has no other piece of a prompt.
    """

    num_before: int
    limit: int
    us: float
    is_first: bool


class PieceSizes:
    """Sizes of pieces of prompts.

    A piece is as large as the step's room allows. If it does not end its prompt, it fills the step up to a size of
    graphs, because padding would take the time of tokens. It also has a price: the next piece reads the context and
    this piece's tokens again. A piece is useful if the price is at most a share of its time (`PieceCosts.max_loss`).
    A prompt waits for the next step rather than have a piece that is not useful.

    Args:
        costs: Model of the time that pieces take.
        max_num_batched_tokens: Limit of a step's tokens.
    """

    def __init__(self, costs: PieceCosts, max_num_batched_tokens: int) -> None:
        self.costs, self._step_sizes = costs, mixed_sizes(max_num_batched_tokens)

    def choose(self, context: int, num_left: int, room: Room) -> int:
        """Return the size of a prompt's next piece; 0 if the prompt waits for the next step.

        A step's first prompt never waits: if what fits is not useful, it has the next larger size that is. Under a
        strict limit it has what fits, but at least _LEAST_TOKENS.

        Args:
            context: Tokens before the piece.
            num_left: Tokens up to the prompt's end, or up to a border where its state is remembered, at least 1.
            room: Room of the step, for at least one token.
        """
        limit = min(num_left, room.limit)
        if self.costs.piece_us(limit, context) <= room.us:
            num_fitting = limit
        else:
            num_fitting = bisect_right(range(1, limit), room.us, key=lambda new: self.costs.piece_us(new, context))
        if num_fitting == num_left:
            return num_left
        ends = self._ends(room.num_before, limit)
        num_ends = bisect_right(ends, num_fitting)
        largest = ends[num_ends - 1] if num_ends else 0
        if room.is_first and self.costs.is_strict:
            return largest if largest >= _LEAST_TOKENS else max(num_fitting, min(limit, _LEAST_TOKENS))
        if largest and self._is_useful(largest, context, num_left):
            return largest
        if room.is_first:
            return next((end for end in ends[num_ends:] if self._is_useful(end, context, num_left)), limit)
        return 0

    def _ends(self, num_before: int, limit: int) -> list[int]:
        """Return the sizes, ascending, that fill a step with num_before tokens up to a size of graphs, and `limit`."""
        sizes = self._step_sizes
        between = sizes[bisect_right(sizes, num_before) : bisect_left(sizes, num_before + limit)]
        return [*(size - num_before for size in between), limit]

    def _is_useful(self, new: int, context: int, num_left: int) -> bool:
        """Return whether a piece ends its prompt, or its price is low."""
        if new == num_left:
            return True
        piece_us, rest_us = self.costs.piece_us(new, context), self.costs.piece_us(num_left - new, context + new)
        price_us = piece_us + rest_us - self.costs.piece_us(num_left, context)
        return price_us <= self.costs.max_loss * piece_us
