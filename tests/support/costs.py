"""Costs of prompts' pieces that send some of them each way."""

from collections.abc import Sequence


class DrawnCosts:
    """A model whose routes follow from a piece's numbers and a seed, and whose bound leaves few tokens beside decodes.

    Args:
        seed: Number that changes the routes, and the width of the pieces that absorbed attention takes.
        absorbs: Whether any piece attends with absorbed queries.
    """

    def __init__(self, seed: int, absorbs: bool = True) -> None:
        self._seed, self._absorbs = seed, absorbs
        self.max_prefill_us = (float("inf"), 150.0, 1.0)[seed % 3]
        self.is_strict, self.max_loss = seed % 2 == 0, 0.25
        self._call_us = (0.0, 0.0, 20.0, 200.0)[seed % 4]
        self.tokens_per_request = 1 + seed % 4
        self.least_state_tokens = (1, 16, 1 << 20)[seed % 3]
        self.num_absorbed = 0  # pieces so far

    def piece_us(self, new: int, context: int) -> float:
        """Return the tokens that all new ones attend to, one each, and the same for each piece."""
        return self._call_us + new * (1.0 + context) + new * (new + 1) / 2

    def choose_absorbed(self, pieces: Sequence[tuple[int, int]]) -> list[bool]:
        """Return two of three pieces."""
        chosen = [self._absorbs and (new + context + self._seed) % 3 > 0 for new, context in pieces]
        self.num_absorbed += sum(chosen)
        return chosen

    def absorbs_all(self, pieces: Sequence[tuple[int, int]]) -> bool:
        """Return True for half of the steps."""
        return self._absorbs and sum(new + context for new, context in pieces) % 2 == self._seed % 2


class DrawnLoadCosts:
    """Choices of loads that depend on the numbers of tokens alone, and are otherwise arbitrary; any load for seed 0."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def should_load(self, num_tokens: int, context: int) -> bool:
        return self._seed == 0 or hash((self._seed, num_tokens, context)) % 3 > 0
