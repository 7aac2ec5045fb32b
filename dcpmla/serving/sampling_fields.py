"""Fields of completions and chats that decide which tokens are chosen and when an answer ends."""

import secrets
from dataclasses import fields
from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field, StringConstraints

from dcpmla.runtime.sampling import SamplingParams
from dcpmla.serving.engine_limits import (
    LARGEST_PENALTY,
    MAX_LOGPROBS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_TOKENS,
    MAX_STOPS,
    MAX_TOKENS,
)
from dcpmla.serving.errors import wrong
from dcpmla.serving.structured import StructuredFields
from dcpmla.serving.transfer_fields import KvTransferParams

MAX_CHOICES = 128  # Answers to one prompt.
_SEEDS = 1 << 64
_MAX_BIASES = 1024

StopTexts = Annotated[
    list[Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARACTERS)]],
    Field(max_length=MAX_STOPS, fail_fast=True),
]
Number = Annotated[str, StringConstraints(pattern=r"^-?[0-9]{1,10}$")]
# Keys of JSON objects are strings.
TokenBiases = Annotated[
    dict[Annotated[str, StringConstraints(pattern=r"^(0|[1-9][0-9]{0,9})$")], Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=_MAX_BIASES),
]


def _kept(value: int | str) -> int:
    """Return a number of tokens to keep: -1, or at least 1."""
    number = int(value)
    if number == 0 or not -1 <= number <= MAX_TOKENS:
        raise ValueError(f"it must be -1 or a whole number of at least 1, not {number}")
    return number


class SamplingFields(StructuredFields):
    """Fields that both kinds of completions have; null is the default."""

    model_config = ConfigDict(allow_inf_nan=False)
    max_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    min_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS)
    truncate_prompt_tokens: Annotated[int | Number, AfterValidator(_kept)] | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_TOKENS)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, gt=-_SEEDS, lt=_SEEDS)
    stop: Annotated[str, StringConstraints(max_length=MAX_STOP_CHARACTERS)] | StopTexts | None = None
    stop_token_ids: (
        Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)] | None
    ) = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    best_of: int | None = None
    presence_penalty: float | None = Field(None, ge=-LARGEST_PENALTY, le=LARGEST_PENALTY)
    frequency_penalty: float | None = Field(None, ge=-LARGEST_PENALTY, le=LARGEST_PENALTY)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    logit_bias: TokenBiases | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    kv_transfer_params: KvTransferParams | None = None

    @property
    def num_choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def token_limit(self) -> int | None:
        """Limit of new tokens that the client names, if it does."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def num_kept_tokens(self, max_model_len: int, max_new_tokens: int) -> int | None:
        """Return how many of its last tokens a prompt keeps at most, None for all.

        Raises:
            ApiError: The new tokens leave no room for a prompt.
        """
        if self.truncate_prompt_tokens is None:
            return None
        number = int(self.truncate_prompt_tokens)
        if number > 0:
            return number
        if max_new_tokens >= max_model_len:
            words = f"is {max_new_tokens}; with truncate_prompt_tokens -1 at most {max_model_len - 1} is allowed"
            raise wrong("max_tokens", words)
        return max_model_len - max_new_tokens

    def params(self, max_new_tokens: int, logprobs: int | None, prompt_logprobs: int | None) -> SamplingParams:
        """Return the parameters that one prompt's requests have in common; without a seed they get a secret one.

        Raises:
            ApiError: More tokens must come than may come, or a field of structured output is wrong.
        """
        if (self.min_tokens or 0) > max_new_tokens:
            raise wrong("min_tokens", f"is {self.min_tokens}; at most max_tokens, {max_new_tokens}, is allowed")
        grammar = self.grammar()
        if self.ignore_eos and grammar is not None:
            raise wrong("ignore_eos", f"is true; with {self.grammar_source} an answer ends where its grammar does")
        values = {
            "temperature": 1.0,
            **self.model_dump(include={field.name for field in fields(SamplingParams)}, exclude_none=True),
            "max_new_tokens": max_new_tokens,
            "top_k": max(0, self.top_k or 0),
            "seed": secrets.randbits(32) if self.seed is None else self.seed % _SEEDS,
            "logprobs": logprobs,
            "prompt_logprobs": prompt_logprobs,
            "grammar": grammar,
        }
        return SamplingParams(**values)
