"""Drafts: guesses at the tokens that follow a request's, which a step verifies all at once."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from dcpmla.runtime.request import Request


class Drafts(NamedTuple):
    """Drafts of a step's decodes.

    Attributes:
        nums: how many each request has.
        token_ids: [sum of nums] int64, request after request; on the CPU where the host knows them, else on the device.
    """

    nums: list[int]
    token_ids: Tensor

    @classmethod
    def of(cls, token_ids: Sequence[Sequence[int]]) -> Self:
        """Return drafts that the host knows."""
        flat = [token for tokens in token_ids for token in tokens]
        return cls([len(tokens) for tokens in token_ids], torch.tensor(flat, dtype=torch.int64))


class Computed(NamedTuple):
    """A request's tokens in the step before, whose tokens are known.

    Attributes:
        row: of its first token in the model's hidden states.
        position: of its first token.
        num_tokens: those that it keeps: all but rejected drafts.
    """

    request: Request
    row: int
    position: int
    num_tokens: int


class Drafter(ABC):
    """A source of drafts. Every rank has its own, and all come to the same drafts.

    Args:
        num_speculative_tokens: most drafts of a request in a step.

    Attributes:
        drafts_always: in every step, not only where that pays.
        follows_prompts: it looks at the tokens of steps with prompts, which are waited for.
    """

    drafts_always = False
    follows_prompts = False

    def __init__(self, num_speculative_tokens: int) -> None:
        self.num_speculative_tokens = num_speculative_tokens

    @abstractmethod
    def draft(self, wanted: Sequence[tuple[Request, int]], computed: Sequence[Computed]) -> Drafts:
        """Guess what follows all known tokens of some requests.

        Args:
            wanted: requests that the next step decodes, and how many drafts of each it has room for.
            computed: the tokens of the step before; empty where it was not waited for.
        Returns:
            At most as many drafts of each request as are wanted.
        """

    def num_accepted(self, drafts: Sequence[int], sampled: Sequence[int]) -> int:
        """Return how many drafts are accepted: those up to the first that is not the token sampled at its position.

        So each is accepted with the probability that sampling gives it, and the tokens are those of sampling one at a
        time: rejection sampling of drafts that are certain, with the random numbers that plain decoding draws.

        Args:
            drafts: [k] of a request.
            sampled: [k + 1] tokens: before each draft, and after the last.
        """
        pairs = zip(drafts, sampled, strict=False)
        return next((num for num, (draft, token) in enumerate(pairs) if draft != token), len(drafts))

    def candidates(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Return those of some requests that there are drafts for: all."""
        return requests

    def close(self) -> None:  # noqa: B027 -- most hold nothing
        """Free what it holds."""
