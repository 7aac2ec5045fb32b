"""The acceptance of drafts: found on the device, counted, and the rule that decides from it and from step times whether
a step drafts.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from dcpmla.upload import upload_once

MAX_DRAFT_ROWS = 256  # tokens of a step with drafts: past these, products are bound by compute and each row costs
_MEMORY = 0.8  # decay of older outcomes at each step
_WEIGHT = 2.0  # number of drafts that the prior counts as in a request's share
_NUM_TIMES = 9  # latest steps of a kind, whose median counts
_NUM_FIRST = 3  # timed steps of a kind before its median is used
_TRIALS = 0.005  # part of the time that may go into trying drafts where they do not pay


class Verified(NamedTuple):
    """The outcome of a step's drafts, [n] int64 each on the device: of every request that gets new tokens.

    Attributes:
        num_accepted, num_rejected: Numbers of drafts.
        newest_at: Index, among the step's new tokens, of the last one that the request keeps.
        newest: The token at that index.
    """

    num_accepted: Tensor
    num_rejected: Tensor
    newest_at: Tensor
    newest: Tensor


class Compared(NamedTuple):
    """The numbers whose equality accepts a draft, int64 on the device.

    Attributes:
        drafts: [sum of nums], request after request.
        sampled: [sum of nums + n], a number for each draft of a request, and one after its last.
    """

    drafts: Tensor
    sampled: Tensor


def verify(drafts: Tensor, sampled: Tensor, nums: Sequence[int], compared: Compared, report: Tensor) -> Verified:
    """Accept the drafts of each request up to the first that is not the token sampled at its position. Nothing waits
    for the device.

    Each draft is thus accepted with its probability under sampling, and the tokens equal one-at-a-time sampling:
    rejection sampling of deterministic drafts, with the random numbers that plain decoding draws.

    Args:
        drafts, sampled: Tokens, in the layout of `compared`.
        nums: [n] number of drafts of each request.
        report: [n + sum of nums] int64 output: the number of accepted drafts of each request, then the drafts.
    """
    first = tuple(accumulate((1 + num for num in nums[:-1]), initial=0))
    starts, nums_there = upload_once((first, tuple(nums)), sampled.device)
    if sampled.is_cuda:
        from dcpmla.runtime.kernels import verification  # triton exists on Linux only

        return Verified(*verification.verify(drafts, sampled, starts, nums_there, compared, report))
    num_accepted = []
    for start, num, draft in zip(first, nums, accumulate(nums, initial=0), strict=False):
        is_right = compared.drafts[draft : draft + num] == compared.sampled[start : start + num]
        num_accepted.append(int(is_right.cumprod(0).sum()))
    report[: len(nums)], report[len(nums) :] = torch.tensor(num_accepted), drafts
    at = starts + report[: len(nums)]
    return Verified(report[: len(nums)], nums_there - report[: len(nums)], at, sampled[at])


@dataclass
class Acceptance:
    """The outcome of drafts of one request or of all requests.

    Attributes:
        num_drafted, num_accepted: Numbers of drafts computed and accepted.
        num_steps: Number of steps with drafts.
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
        num_looked_at = min(num_drafts, num_accepted + 1)  # drafts past a rejected one carry no information
        self._tried = _MEMORY * self._tried + num_looked_at
        self._hit = _MEMORY * self._hit + num_accepted

    def share(self, prior: float) -> float:
        """Return the share of examined drafts that were accepted lately; near the prior while few were examined."""
        return (self._hit + _WEIGHT * prior) / (self._tried + _WEIGHT)

    def metrics(self) -> dict[str, float | None]:
        """Return num_draft_tokens, num_accepted_tokens, and mean_accepted_length: new tokens per step with drafts,
        including the one sampled after them. The request must have drafted.
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
    """The rule that a step drafts if drafting yields more tokens per second.

    With k drafts, each accepted with probability p if the drafts before it were, a step yields 1 + p + ... + p^k tokens
    (Leviathan et al., Fast Inference from Transformers via Speculative Decoding). p is a request's own recent share.
    Times of steps with about as many requests, with and without drafts, are measured while serving; all ranks must
    receive the same times. Where drafts do not pay, they are retried rarely enough to cost 0.5 % of the time.
    """

    def __init__(self) -> None:
        self._all = Acceptance()
        self._times: dict[tuple[int, bool], deque[float]] = defaultdict(lambda: deque(maxlen=_NUM_TIMES))
        self._num_plain = 0  # steps since the last one with drafts

    def count(self, num_drafts: int, num_accepted: int) -> None:
        """Record the outcome of a request's drafts."""
        self._all.count(num_drafts, num_accepted)

    def count_step(self, has_drafts: bool) -> None:
        """Count a step of decodes."""
        self._num_plain = 0 if has_drafts else self._num_plain + 1

    def learn(self, time: StepTime) -> None:
        """Record the time of a step."""
        self._times[time.num_reqs.bit_length(), time.has_drafts].append(time.seconds)

    def pays(self, drafting: Sequence[Acceptance], num_reqs: int, num_drafts: int) -> bool:
        """Return whether the next step drafts.

        Args:
            drafting: Acceptance of each request that would draft.
            num_reqs: Number of all requests in the step.
            num_drafts: Number of drafts per drafting request.
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
