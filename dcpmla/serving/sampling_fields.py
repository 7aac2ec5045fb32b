"""Fields of completions and chats that decide which tokens are chosen and when an answer ends: the fields of
`SamplingParams`, and those that only HTTP has.
"""

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

from pydantic import BaseModel, GetCoreSchemaHandler, PlainValidator, ValidationInfo, create_model

from dcpmla.fields import Rule, check_fields, is_whole, rules_of, whole
from dcpmla.runtime.sampling import MAX_BIASES, SamplingParams, as_param
from dcpmla.serving.engine_limits import LIMITS, MAX_LOGPROBS, MAX_TOKENS
from dcpmla.serving.errors import wrong
from dcpmla.serving.structured import StructuredFields
from dcpmla.serving.transfer_fields import KvTransferParams

DEFAULTS = {"temperature": 1.0, "seed": None}  # Where they are not the parameters' own; None: it is drawn.
_SEEDS = 1 << 64
_KEY = re.compile("0|[1-9][0-9]{0,9}")  # Keys of JSON objects are strings.
_NUMBER = re.compile("-?[0-9]{1,10}")
_OTHERWISE = {"max_new_tokens", "logprobs", "prompt_logprobs", "grammar"}  # parameters that other fields give
_RULES = {**rules_of(SamplingParams), **LIMITS}
Kind = TypeVar("Kind", bound=BaseModel)


def _are_biases(value: object) -> bool:
    if not isinstance(value, dict) or len(value) > MAX_BIASES or not all(map(_KEY.fullmatch, value)):
        return False
    return _RULES["logit_bias"].holds(as_param("logit_bias", value))


def _is_kept(value: object) -> bool:
    """Return whether a value is a number of tokens to keep, or its text: -1, or at least 1."""
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        value = int(value)
    return is_whole(value) and value != 0 and -1 <= value <= MAX_TOKENS


_KEPT = Rule("-1, or a whole number of at least 1", _is_kept)
_CHOICES = whole(1, 128)
# What HTTP takes in place of the parameters' values.
_OWN = {
    "top_k": Rule(f"{whole(-1, MAX_TOKENS).words} (-1 and 0 are all tokens)", whole(-1, MAX_TOKENS).holds),
    "seed": Rule("a whole number in (-2^64, 2^64)", whole(1 - _SEEDS, _SEEDS - 1).holds),
    **dict.fromkeys(("logprobs", "prompt_logprobs"), whole(0, MAX_LOGPROBS)),
    "logit_bias": Rule(f"an object of {_RULES['logit_bias'].words}", _are_biases),
}


@dataclass(frozen=True)
class Ruled:
    """The check of a body's field by a rule. Null is allowed where the field's type has it."""

    rule: Rule

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        kinds = get_args(source)

        def check(value: Any, info: ValidationInfo) -> Any:
            if value is None and type(None) in kinds:
                return None
            check_fields({str(info.field_name): self.rule}, {str(info.field_name): value})
            return float(value) if float in kinds else value

        return PlainValidator(check).__get_pydantic_core_schema__(Any, handler)


def ruled(name: str) -> Ruled:
    """Return the check of a field that gives the parameter with a name."""
    rule = _RULES[name]
    return Ruled(_OWN.get(name) or replace(rule, holds=lambda value: rule.holds(as_param(name, value))))


def takes(*names: str) -> Callable[[type[Kind]], type[Kind]]:
    """Return a decorator of a body's class. The class it returns has fields for the parameters with some names, or for
    all; null is the default.
    """

    types = get_type_hints(SamplingParams)

    def add(kind: type[Kind]) -> type[Kind]:
        chosen = names or [name for name in types if name not in _OTHERWISE]
        more: dict[str, Any] = {name: (Annotated[types[name] | None, ruled(name)], None) for name in chosen}
        return create_model(kind.__name__, __base__=kind, __module__=kind.__module__, __doc__=kind.__doc__, **more)

    return add


@takes()
class SamplingFields(StructuredFields):
    """Fields that both kinds of completions have; null is the default.

    Attributes:
        max_tokens: Limit of new tokens; of completions 16 by default, of chats what the prompt leaves of
            `--max-model-len`. Messages need it. More than `--max-model-len` gets 400; more than the prompt leaves is
            cut, and the answer's header `dcpmla-max-tokens` says to how many.
        max_completion_tokens: Limit of new tokens that wins over max_tokens.
        min_tokens: Number of new tokens before which no end-of-sequence or stop token is chosen, and that contain no
            stop string; at most max_tokens.
        truncate_prompt_tokens: Number of the prompt's last tokens that are kept; -1 keeps `--max-model-len` less
            max_tokens (1 for chats without it). A `<bos>` at the beginning goes as well.
        logit_bias: Numbers that are added to the logits of tokens, by token id, before penalties.
        seed: Seed of the answer's draws: the same one gives the same answer as `generate` from the stream of the
            choice's number.
        n: Number of answers to each prompt, 1 by default.
        best_of: Number that must equal n.
        prompt_logprobs: Number of best tokens whose log probabilities are shown for each token of the prompt, null for
            the first: `{token id: {logprob, rank, decoded_token}}`. The best tokens alone have a `rank`. They are in
            the choice or, of chats, in the answer; not with `stream`.
    """

    max_tokens: Annotated[int | None, Ruled(whole(0, MAX_TOKENS))] = None
    max_completion_tokens: Annotated[int | None, Ruled(whole(1, MAX_TOKENS))] = None
    truncate_prompt_tokens: Annotated[int | str | None, Ruled(_KEPT)] = None
    n: Annotated[int | None, Ruled(_CHOICES)] = None
    best_of: Annotated[int | None, Ruled(_CHOICES)] = None
    prompt_logprobs: Annotated[int | None, ruled("prompt_logprobs")] = None
    kv_transfer_params: KvTransferParams | None = None

    @property
    def num_choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def token_limit(self) -> int | None:
        """Limit of new tokens that the client names, if it does."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def limit(self, max_model_len: int, name: str) -> int | None:
        """Return the limit of new tokens that the client names, if it does.

        Args:
            name: Name of the limit in the route's body; empty for the names here.
        Raises:
            ApiError: No sequence has so many tokens.
        """
        limit = self.token_limit
        if limit is not None and limit > max_model_len:
            name = name or ("max_tokens" if self.max_completion_tokens is None else "max_completion_tokens")
            raise wrong(name, f"is {limit:,}; prompt and new tokens together have at most {max_model_len:,} here")
        return limit

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
        own = {field.name for field in fields(SamplingParams)} - _OTHERWISE
        given: dict[str, Any] = DEFAULTS | self.model_dump(include=own, exclude_none=True)
        if given.get("min_tokens", 0) > max_new_tokens:
            raise wrong("min_tokens", f"is {given['min_tokens']}; at most max_tokens, {max_new_tokens}, is allowed")
        grammar = self.grammar()
        if given.get("ignore_eos") and grammar is not None:
            raise wrong("ignore_eos", f"is true; with {self.grammar_source} an answer ends where its grammar does")
        values = {
            "max_new_tokens": max_new_tokens,
            "top_k": max(0, given.get("top_k", 0)),
            "seed": secrets.randbits(32) if given["seed"] is None else given["seed"] % _SEEDS,
            "logprobs": logprobs,
            "prompt_logprobs": prompt_logprobs,
            "grammar": grammar,
        }
        return SamplingParams(**given | values)
