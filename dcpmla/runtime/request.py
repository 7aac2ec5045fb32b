"""A request on its way through the engine."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Request:
    """A prompt and what has become of it.

    Attributes:
        max_new_tokens: where to stop at the latest.
        temperature: 0 for greedy.
        seed: of the request's own random numbers, which do not depend on its neighbours in the batch or on the ranks.
        token_ids: new tokens so far; an end-of-sequence token is the last one.
        logits: [vocab] float32 each new token was chosen from, when the engine keeps them.
        finish_reason: "stop" at an end-of-sequence token, "length" at max_new_tokens, None while running.
    """

    prompt_token_ids: list[int]
    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0
    token_ids: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    finish_reason: str | None = None
    num_computed_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise ValueError("prompt_token_ids is empty; a prompt needs at least one token")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens (--max-new-tokens) is {self.max_new_tokens}; it must be at least 1")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature (--temperature) is {self.temperature}; it must be a number of at least 0")
        self.generator = torch.Generator().manual_seed(self.seed)

    @property
    def max_seq_len(self) -> int:
        """Tokens that may end up in the cache: all but the last new one."""
        return len(self.prompt_token_ids) + self.max_new_tokens - 1

    @property
    def num_pending_tokens(self) -> int:
        """Known tokens that are not computed yet."""
        return len(self.prompt_token_ids) + len(self.token_ids) - self.num_computed_tokens

    def pending(self, num_tokens: int) -> list[int]:
        """The next num_tokens tokens to compute."""
        known = self.prompt_token_ids + self.token_ids
        return known[self.num_computed_tokens : self.num_computed_tokens + num_tokens]

    def append(self, token_id: int, eos_token_ids: frozenset[int]) -> None:
        """Take a sampled token, and finish where it says so."""
        self.token_ids.append(token_id)
        if token_id in eos_token_ids:
            self.finish_reason = "stop"
        elif len(self.token_ids) == self.max_new_tokens:
            self.finish_reason = "length"
