"""The acceptance of drafts, and the rule whether a step drafts: from that and from what steps take."""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

MAX_DRAFT_ROWS = 256  # tokens of a step with drafts: past these, products are bound by compute and each row costs
_MEMORY = 0.8  # weight of what was known before a step's outcome
_WEIGHT = 2.0  # drafts that the outcome of all requests counts as in the share of one
_NUM_TIMES = 9  # latest steps of a kind, whose median counts
_NUM_FIRST = 3  # steps of a kind that must have been timed to know what they take
_TRIALS = 0.005  # part of the time that may go into trying drafts where they do not pay


@dataclass
class Acceptance:
    """The outcome of drafts, those of a request or of all.

    Attributes:
        num_drafted, num_accepted: drafts computed, and those that became tokens.
        num_steps: with drafts.
    """

    num_drafted: int = 0
    num_accepted: int = 0
    num_steps: int = 0
    _tried: float = 0.0
    _hit: float = 0.0

    def count(self, num_drafts: int, num_accepted: int) -> None:
        """Take the outcome of a step with drafts."""
        self.num_steps += 1
        self.num_drafted += num_drafts
        self.num_accepted += num_accepted
        num_looked_at = min(num_drafts, num_accepted + 1)  # drafts past a rejected one say nothing
        self._tried = _MEMORY * self._tried + num_looked_at
        self._hit = _MEMORY * self._hit + num_accepted

    def share(self, prior: float) -> float:
        """Return the share of drafts accepted lately, of those that were looked at; near the prior as long as these
        are few.
        """
        return (self._hit + _WEIGHT * prior) / (self._tried + _WEIGHT)

    def metrics(self) -> dict[str, float | None]:
        """Return num_draft_tokens, num_accepted_tokens, and mean_accepted_length: tokens that a step with drafts gave,
        the one past them among them. For a request that drafted.
        """
        return {
            "num_draft_tokens": self.num_drafted,
            "num_accepted_tokens": self.num_accepted,
            "mean_accepted_length": round(1 + self.num_accepted / self.num_steps, 3),
        }


class StepTime(NamedTuple):
    """The time that a step of decodes took, from the tokens before it to its own."""

    num_reqs: int
    has_drafts: bool
    seconds: float


class Payoff:
    """The rule whether a step drafts: where that makes more tokens a second.

    Of k drafts that are each accepted with probability p, if those before are, a step gives 1 + p + ... + p^k tokens
    (Leviathan et al., Fast Inference from Transformers via Speculative Decoding). p is a request's own share of late.
    The time that steps of about as many requests take, with drafts and without, is measured as they go: ranks must be
    given the same times. Where drafts do not pay they are tried again so seldom that it costs 0.5 % of the time.
    """

    def __init__(self) -> None:
        self._all = Acceptance()
        self._times: dict[tuple[int, bool], deque[float]] = defaultdict(lambda: deque(maxlen=_NUM_TIMES))
        self._num_plain = 0  # steps since the last one with drafts

    def count(self, num_drafts: int, num_accepted: int) -> None:
        """Take the outcome of a request's drafts."""
        self._all.count(num_drafts, num_accepted)

    def count_step(self, has_drafts: bool) -> None:
        """Count a step of decodes."""
        self._num_plain = 0 if has_drafts else self._num_plain + 1

    def learn(self, time: StepTime) -> None:
        """Take the time of a step."""
        self._times[time.num_reqs.bit_length(), time.has_drafts].append(time.seconds)

    def pays(self, drafting: Sequence[Acceptance], num_reqs: int, num_drafts: int) -> bool:
        """Tell whether the next step drafts.

        Args:
            drafting: of each request that would have drafts.
            num_reqs: all requests of the step.
            num_drafts: of each.
        """
        plain, wide = (self._times[num_reqs.bit_length(), has_drafts] for has_drafts in (False, True))
        if len(plain) < _NUM_FIRST or len(wide) < _NUM_FIRST:
            return len(plain) >= _NUM_FIRST
        cost = median(wide) / median(plain)
        prior, gain = self._all.share(prior=0.8), 0.0
        for acceptance in drafting:
            share = acceptance.share(prior)
            gain += sum(share**index for index in range(1, num_drafts + 1))
        return gain > num_reqs * (cost - 1) or _TRIALS * self._num_plain > cost - 1
