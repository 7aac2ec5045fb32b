"""Drafts: guesses at the tokens that follow a request's, which a step verifies all at once."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from dcpmla.runtime.request import Request
from dcpmla.upload import upload

if TYPE_CHECKING:
    from dcpmla.runtime.pending import PendingStep

NO_DRAFT = -1  # in place of a draft's id where a drafter finds none: the model computes token 0, and it is rejected


class Drafts(NamedTuple):
    """Drafts of a step's decodes.

    Attributes:
        nums: how many each request has.
        token_ids: [sum of nums] int64, request after request, some maybe `NO_DRAFT`; on the CPU where the host knows
            them, else on the device.
    """

    nums: list[int]
    token_ids: Tensor

    @classmethod
    def of(cls, token_ids: Sequence[Sequence[int]]) -> Self:
        """Return drafts that the host knows."""
        flat = [token for tokens in token_ids for token in tokens]
        return cls([len(tokens) for tokens in token_ids], torch.tensor(flat, dtype=torch.int64))


class Drafter(ABC):
    """A source of drafts. Every rank has its own, and all come to the same drafts.

    Args:
        num_speculative_tokens: most drafts of a request in a step.

    Attributes:
        drafts_always: in every step, not only where that pays.
        reads_tokens: it looks at all tokens so far on the host, so steps that drafts follow are waited for; one that
            does not takes the tokens under way from the device.
    """

    drafts_always = False
    reads_tokens = True

    def __init__(self, num_speculative_tokens: int) -> None:
        self.num_speculative_tokens = num_speculative_tokens

    @abstractmethod
    def draft(self, wanted: Sequence[tuple[Request, int]], previous: "PendingStep | None") -> Drafts:
        """Guess what follows all tokens of some requests. Called for each step, before it is launched.

        Args:
            wanted: requests that the step computes, and how many drafts of each it has room for.
            previous: the step before, under way or not; None before the first.
        Returns:
            At most as many drafts of each request as are wanted.
        """

    def num_accepted(self, drafts: Tensor, sampled: Tensor, nums: Sequence[int]) -> Tensor:
        """Count the drafts of each request that are accepted: those up to the first that is not the token sampled at
        its position. Nothing waits for the device.

        So each is accepted with the probability that sampling gives it, and the tokens are those of sampling one at a
        time: rejection sampling of drafts that are certain, with the random numbers that plain decoding draws.

        Args:
            drafts: [sum of nums] int64.
            sampled: [sum of nums + n] int64: of each request, before each of its drafts, and after the last.
            nums: [n] drafts of each request.
        Returns:
            [n] int64.
        """
        guesses = by_request(drafts, nums, missing=NO_DRAFT)
        tokens = by_request(sampled, [num + 1 for num in nums], missing=0)[:, :-1]
        return (guesses == tokens).cumprod(-1).sum(-1)

    def candidates(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Return those of some requests that there are drafts for: all."""
        return requests

    def close(self) -> None:  # noqa: B027 -- most hold nothing
        """Free what it holds."""


def by_request(flat: Tensor, nums: Sequence[int], missing: int) -> Tensor:
    """Return the numbers [sum of nums] of requests as rows [n, largest of nums], filled up with what is missing."""
    most = max(nums)
    if min(nums) == most:
        return flat.view(len(nums), most)
    starts, columns = np.array([*accumulate(nums[:-1], initial=0)]), np.arange(most)
    at = np.where(columns < np.array(nums)[:, None], starts[:, None] + columns, len(flat))
    (there,) = upload([at], flat.device)
    return torch.cat([flat, flat.new_full((1,), missing)])[there]
