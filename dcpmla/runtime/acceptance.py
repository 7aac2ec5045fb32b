"""The acceptance of a request's drafts, and the rule of how many to try next."""

from dataclasses import dataclass

MAX_DRAFT_ROWS = 256  # tokens of a step with drafts: past these, products are bound by compute and each row costs
_COST_OF_WAITING = 0.05  # of a step that starts when the one before it is known, in steps of one token a request
_COST_OF_A_DRAFT = 0.1  # each, in such steps
_MEMORY = 0.9  # weight of what was known before a step's outcome
_PAUSE = 32  # steps without drafts where they do not pay, before one is tried again


@dataclass
class Acceptance:
    """The outcome of a request's drafts.

    The rule: of drafts that are each accepted with probability p, if those before are, k give
    1 + p + ... + p^k tokens for the time of 1.05 + 0.1 k plain steps. As many are wanted as make the most tokens a
    second, none where plain steps do. p is the share of drafts accepted lately, of those that were looked at (drafts
    past a rejected one are not). Where none are wanted, one is tried every 32 steps.

    Attributes:
        num_drafted, num_accepted: drafts computed, and those that became tokens.
        num_steps: with drafts.
    """

    num_drafted: int = 0
    num_accepted: int = 0
    num_steps: int = 0
    _tried: float = 2.0
    _hit: float = 1.6  # as though 80 % had been accepted before the first
    _num_paused: int = 0

    def count(self, num_drafts: int, num_accepted: int) -> None:
        """Take the outcome of a decode step, with drafts or without."""
        self._num_paused += 1
        if not num_drafts:
            return
        self.num_steps += 1
        self.num_drafted += num_drafts
        self.num_accepted += num_accepted
        self._tried = _MEMORY * self._tried + min(num_drafts, num_accepted + 1)
        self._hit = _MEMORY * self._hit + num_accepted
        self._num_paused = 0

    def metrics(self) -> dict[str, float | None]:
        """Return num_draft_tokens, num_accepted_tokens, and mean_accepted_length: tokens that a step with drafts gave,
        the one past them among them. For a request that drafted.
        """
        return {
            "num_draft_tokens": self.num_drafted,
            "num_accepted_tokens": self.num_accepted,
            "mean_accepted_length": round(1 + self.num_accepted / self.num_steps, 3),
        }

    def num_wanted(self, most: int) -> int:
        """Return how many drafts to try next, at most so many."""
        share = self._hit / self._tried
        best, best_speed, tokens = 0, 1.0, 1.0
        for num_drafts in range(1, most + 1):
            tokens += share**num_drafts
            speed = tokens / (1 + _COST_OF_WAITING + _COST_OF_A_DRAFT * num_drafts)
            if speed > best_speed:
                best, best_speed = num_drafts, speed
        return min(1, most) if not best and self._num_paused >= _PAUSE else best
