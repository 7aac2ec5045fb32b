"""The modelled time of pieces of prompts in a model of two kinds of layers."""

from collections.abc import Sequence
from dataclasses import dataclass

from dcpmla.attention.costs import CUT_US, LatentCosts


@dataclass(frozen=True)
class WindowedCosts:
    """The time of layers without and with a window; a piece takes the same route in all layers.

    Attributes:
        full, windowed: Costs of the layers of each kind.
    """

    full: LatentCosts
    windowed: LatentCosts

    @property
    def tokens_per_request(self) -> int:
        """Return how many tokens absorbed attention takes at a time."""
        return self.full.tokens_per_request

    def piece_us(self, new: int, context: int) -> float:
        """Return the microseconds of all layers (`AttentionCosts.piece_us`)."""
        return self.full.piece_us(new, context) + self.windowed.piece_us(new, context)

    def choose_absorbed(self, pieces: Sequence[tuple[int, int]]) -> list[bool]:
        """Return which pieces of a step attend with absorbed queries (`RouteCosts.choose_absorbed`)."""
        return [lost < 0 for lost in self._lost_us(pieces)]

    def absorbs_all(self, pieces: Sequence[tuple[int, int]]) -> bool:
        """Return whether absorbed attention to all pieces costs less than the launches that it saves."""
        num_layers = self.full.num_layers + self.windowed.num_layers
        return sum(max(0.0, lost) for lost in self._lost_us(pieces)) < num_layers * CUT_US

    def _lost_us(self, pieces: Sequence[tuple[int, int]]) -> list[float]:
        """Return the microseconds of all layers that each piece takes longer with absorbed queries than by MHA."""
        lost = [0.0] * len(pieces)
        for kind in (self.full, self.windowed):
            num_tiles = sum(kind.num_tiles(new) for new, _ in pieces)
            for index, piece in enumerate(pieces):
                lost[index] += kind.num_layers * (kind.absorbed_us(*piece) - kind.mha_us(*piece, num_tiles))
        return lost
