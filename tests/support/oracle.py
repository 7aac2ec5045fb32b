"""An unsharded model as the oracle of answers: one pass over a prompt and its new tokens gives the logits of each."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

Answer = tuple[list[int], Tensor]  # new tokens and their logits [n, vocab]


class Oracle:
    """A model that computes each sequence once, because ranks and layouts share sequences.

    Args:
        model: Function of token ids [1, T] that returns an object with logits [1, T, vocab].
    """

    def __init__(self, model: Callable[[Tensor], Any]) -> None:
        self.model = model
        self._logits = functools.cache(self._compute)

    @torch.no_grad()
    def _compute(self, *token_ids: int) -> Tensor:
        logits: Tensor = self.model(torch.tensor([token_ids])).logits[0]
        return logits.float()

    def logits(self, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """Return the logits of an answer's tokens [n, vocab]."""
        return self._logits(*prompt, *tokens[:-1])[len(prompt) - 1 :]

    def check(
        self, prompt: Sequence[int], tokens: Sequence[int], logits: Tensor, name: object = "", atol: float = 1e-4
    ) -> None:
        """Assert that an answer's logits [n, vocab] are the model's, and that its tokens are the best ones."""
        expected = self.logits(prompt, tokens)
        torch.testing.assert_close(logits, expected, atol=atol, rtol=0, msg=lambda text: f"{name}: {text}")
        self.check_tokens(prompt, tokens, name)

    def check_tokens(self, prompt: Sequence[int], tokens: Sequence[int], name: object = "") -> None:
        """Assert that an answer's tokens are the best ones."""
        assert list(tokens) == self.logits(prompt, tokens).argmax(-1).tolist(), name

    def errors(self, prompts: Sequence[Sequence[int]], layouts: Iterable[Sequence[Answer]]) -> list[float]:
        """Return the errors of the answers to prompts in each layout."""
        return [
            self.error(prompt, *answer) for answers in layouts for prompt, answer in zip(prompts, answers, strict=True)
        ]

    def error(self, prompt: Sequence[int], tokens: Sequence[int], logits: Tensor) -> float:
        """Return the norm of the error of an answer's logits, beside the norm of the model's."""
        expected = self.logits(prompt, tokens)
        return float((logits - expected).norm() / expected.norm())
