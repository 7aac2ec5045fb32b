"""Drafts: guesses at the tokens that follow a request's, which a step verifies all at once."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Self

import torch
from torch import Tensor

from dcpmla.runtime.request import Request
from dcpmla.runtime.verification import Compared

if TYPE_CHECKING:
    from dcpmla.runtime.in_flight import InFlightStep

NO_DRAFT = -1  # in place of a draft's id where a drafter finds none: the model computes token 0, and it is rejected


class Drafts(NamedTuple):
    """Drafts of a step's decodes.

    Attributes:
        nums: Number of drafts of each request.
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
        drafts_always: Whether every step drafts, not only steps where drafts pay.
        reads_tokens: it looks at all tokens so far on the host, so steps that drafts follow are waited for; one that
            does not takes the tokens under way from the device.
    """

    drafts_always = False
    reads_tokens = True

    def __init__(self, num_speculative_tokens: int) -> None:
        self.num_speculative_tokens = num_speculative_tokens

    @abstractmethod
    def draft(self, wanted: Sequence[tuple[Request, int]], previous: "InFlightStep | None") -> Drafts:
        """Guess what follows all tokens of some requests. Called for each step, before it is launched.

        Args:
            wanted: requests that the step computes, and how many drafts of each it has room for.
            previous: the step before, under way or not; None before the first.
        Returns:
            At most as many drafts of each request as are wanted.
        """

    def compared(self, drafts: Tensor, sampled: Tensor, nums: Sequence[int]) -> Compared:
        """Return what decides whether drafts are accepted (`verify`): they and the tokens sampled.

        Args:
            nums: [n] drafts of each request.
        """
        return Compared(drafts, sampled)

    def candidates(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Return the requests for which drafts exist: all."""
        return requests

    def close(self) -> None:  # noqa: B027 -- most hold nothing
        """Free the drafter's memory."""


class NoDrafter(Drafter):
    """A drafter without drafts: steps have one token of each decode."""

    reads_tokens = False

    def __init__(self) -> None:
        super().__init__(0)

    def draft(self, wanted: Sequence[tuple[Request, int]], previous: "InFlightStep | None") -> Drafts:
        """Return no drafts."""
        return Drafts.of([])

    def candidates(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Return no request."""
        return []
