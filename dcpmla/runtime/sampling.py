"""Sampling of tokens from logits, and its parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Annotated, Any, Self

import numpy as np
from torch import Tensor

from dcpmla.fields import (
    TEXT,
    Count,
    Flag,
    Rule,
    check_fields,
    instance_of,
    is_number,
    is_whole,
    number,
    option_label,
    optional,
    rules_of,
    tuple_of,
    whole,
)
from dcpmla.runtime.draws import draw_tokens
from dcpmla.runtime.grammar import Grammar, as_grammar
from dcpmla.upload import upload

NOT_FINITE = -1  # instead of a token, after logits whose maximum is NaN or infinite
_MAX_ROWS = 64  # drawn at once: float64 copies of [rows, vocab] stay small compared with the logits of a large batch
_LARGEST_PENALTY = 100.0
_LARGEST_BIAS = 100.0
MAX_BIASES = 1024
_MAX_ID_DIGITS = 20
_Natural = Annotated[int, whole(0)]
_Penalty = Annotated[float, number(-_LARGEST_PENALTY, _LARGEST_PENALTY)]
_NumLogprobs = Annotated[int | None, optional(whole(0))]


def _are_biases(value: object) -> bool:
    """Return whether a value is pairs of `_bias_pairs`, few enough and in range."""
    if not isinstance(value, tuple) or len(value) > MAX_BIASES or not all(isinstance(pair, tuple) for pair in value):
        return False
    ids, numbers = [token for token, _ in value], [bias for _, bias in value]
    are_allowed = all(map(whole(0).holds, ids)) and all(map(number(-_LARGEST_BIAS, _LARGEST_BIAS).holds, numbers))
    return are_allowed and len(set(ids)) == len(ids)


_BIASES = Rule(
    f"at most {MAX_BIASES:,} different token ids, each with a number in [-{_LARGEST_BIAS:g}, {_LARGEST_BIAS:g}]",
    _are_biases,
)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The parameters by which a request chooses its tokens and ends.

    Args:
        max_new_tokens: Limit of new tokens, at least 1.
        temperature: Divisor of the logits before the softmax to draw from; 0 takes the best token.
        top_p: Probability in (0, 1] that the fewest best tokens to draw from must reach.
        top_k: Number of best tokens to draw from, plus ties with the last; 0 is all.
        seed: Seed of the request's draws, in [0, 2^64).
        stop: Strings that end the request, or one string; an empty one is no string.
        stop_token_ids: Ids of tokens that end the request as an end-of-sequence token does.
        ignore_eos: Whether to continue after an end-of-sequence token (for benchmarks).
        min_tokens: Number of new tokens before which no end-of-sequence or stop token is chosen, and that contain no
            stop string; at most max_new_tokens.
        logit_bias: Numbers in [-100, 100] that are added to the logits of tokens, by token id, before penalties; a
            mapping, or pairs. Ids may be texts, the keys of a JSON object.
        include_stop_str_in_output: Whether the text includes the stop string, or the text of the stop token.
        skip_special_tokens: Whether the text is without special tokens.
        min_p: Share of the best token's probability, in [0, 1], below which tokens are left out; applied before top-k
            and top-p.
        presence_penalty: Number subtracted from the logit of each token that is among the new ones.
        frequency_penalty: Number subtracted from a token's logit once per occurrence among the new ones.
        repetition_penalty: Divisor of positive logits, and factor of others, of tokens in the prompt or among the new
            ones; 1 is none.
        logprobs: Number of best tokens whose log probabilities are kept besides each new token's (`Request.logprobs`);
            None keeps none.
        prompt_logprobs: Number like logprobs, for the prompt's tokens (`Request.prompt_logprobs`); None keeps none.
        grammar: Grammar that the new tokens follow; of a JSON object, its fields. End-of-sequence and stop tokens are
            chosen only where it may end. Needs the extra structured.
    Raises:
        ValueError: A value has another type, or is outside its range.
    """

    max_new_tokens: Count = 16
    temperature: Annotated[float, number(0)] = 0.0
    top_p: Annotated[float, number(0, 1, above=True)] = 1.0
    top_k: Annotated[int, Rule(f"{whole(0).words} (0 is all tokens)", whole(0).holds)] = 0
    seed: Annotated[int, Rule("a whole number in [0, 2^64)", whole(0, (1 << 64) - 1).holds)] = 0
    stop: Annotated[Sequence[str], tuple_of(TEXT)] = ()
    stop_token_ids: Annotated[Sequence[int], tuple_of(whole(0))] = ()
    ignore_eos: Flag = False
    min_tokens: _Natural = 0
    logit_bias: Annotated[Mapping[int, float] | Sequence[tuple[int, float]], _BIASES] = ()
    include_stop_str_in_output: Flag = False
    skip_special_tokens: Flag = True
    min_p: Annotated[float, number(0, 1)] = 0.0
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    repetition_penalty: Annotated[float, number(0, _LARGEST_PENALTY, above=True)] = 1.0
    logprobs: _NumLogprobs = None
    prompt_logprobs: _NumLogprobs = None
    grammar: Annotated[Grammar | None, optional(instance_of(Grammar))] = None

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids", "logit_bias", "grammar"):
            object.__setattr__(self, name, as_param(name, getattr(self, name)))
        check_fields(rules_of(SamplingParams), vars(self), option_label)
        object.__setattr__(self, "temperature", float(self.temperature))  # A message has no integers of any size.
        if self.min_tokens > self.max_new_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}; max_new_tokens, {self.max_new_tokens}, is the most")
        if self.ignore_eos and self.grammar is not None:
            raise ValueError("ignore_eos is True; a request with a grammar ends where the grammar does")

    @classmethod
    def from_dict(cls, values: Mapping[str, object], defaults: "SamplingParams") -> "SamplingParams":
        """Return the defaults updated with the values of a JSON object.

        Raises:
            ValueError: A key is not a field, or a value is not allowed.
        """
        allowed = [field.name for field in fields(cls)]
        for key in values:
            if key not in allowed:
                raise ValueError(f"{key!r} is not a sampling parameter; allowed are {', '.join(allowed)}")
        return replace(defaults, **values)  # type: ignore[arg-type]  # __post_init__ checks the types

    @cached_property
    def has_penalties(self) -> bool:
        """Return whether the choice of a token depends on the tokens before it."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @cached_property
    def shapes_logits(self) -> bool:
        """Return whether the logits of every choice are changed. Those before min_tokens are changed in any case."""
        return self.has_penalties or bool(self.logit_bias) or (self.min_p > 0 and self.temperature > 0)

    @cached_property
    def biases(self) -> tuple["np.ndarray[Any, np.dtype[np.int64]]", "np.ndarray[Any, np.dtype[np.float32]]"]:
        """Return the token ids and numbers of logit_bias."""
        ids, numbers = zip(*self.logit_bias, strict=True) if self.logit_bias else ((), ())
        return np.array(ids, dtype=np.int64), np.array(numbers, dtype=np.float32)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ValueError if logit_bias or the grammar has a token that the model does not have."""
        marker = () if self.grammar is None else self.grammar.starts_after
        for name, tokens in (("logit_bias", self.biases[0].tolist()), ("grammar.starts_after", marker)):
            outside = [token for token in tokens if token >= vocab_size]
            if outside:
                raise ValueError(f"{name} has token id {outside[0]}; the model's vocabulary is [0, {vocab_size})")

    def at_most(self, num_tokens: int) -> Self:
        """Return these params with at most num_tokens new tokens."""
        return replace(
            self, max_new_tokens=min(self.max_new_tokens, num_tokens), min_tokens=min(self.min_tokens, num_tokens)
        )

    def for_prompt(self, index: int) -> "SamplingParams":
        """Return these params for prompt number `index`, which draws from its own stream, seeded with
        seed x 2^31 + index, independent of the other prompts.
        """
        return replace(self, seed=((self.seed << 31) + index) % (1 << 64))


def as_param(name: str, value: object) -> object:
    """Return a parameter's value in the form of its rule: a tuple, pairs of biases or a grammar; others as given."""
    match name:
        case "logit_bias":
            return _bias_pairs(value)
        case "grammar":
            return as_grammar(value)
        case "stop" if isinstance(value, str):
            return (value,) if value else ()
    return tuple(value) if isinstance(value, list) else value


def _bias_pairs(biases: object) -> object:
    """Return logit_bias as pairs in the order of the ids, or unchanged if that is impossible."""
    pairs = list(biases.items()) if isinstance(biases, Mapping) else biases
    if not isinstance(pairs, list | tuple) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs
    ):
        return biases
    numbers = [(int(token) if _is_decimal(token) else token, bias) for token, bias in pairs]
    return tuple(sorted(numbers)) if all(is_whole(token) and is_number(bias) for token, bias in numbers) else biases


def _is_decimal(token: object) -> bool:
    return isinstance(token, str) and token.isdecimal() and len(token) < _MAX_ID_DIGITS


def sample(logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float] | Tensor) -> Tensor:
    """Choose a token for each row, independent of the other rows. Nothing waits for the device.

    Args:
        logits: [n, vocab] float32.
        params: [n].
        uniforms: [n] random numbers in [0, 1), on the host or float64 on the device, from `request.new_generator`,
            which is on the CPU, so that a seed gives the same ones on every device. Ignored for rows that do not draw.
    Returns:
        Tokens [n] int64 on the device of the logits; NOT_FINITE for rows whose maximum is NaN or infinite.
    """
    tokens = logits.argmax(-1)
    best = logits.gather(-1, tokens[:, None])[:, 0]
    drawn = [row for row, param in enumerate(params) if param.temperature > 0]
    for start in range(0, len(drawn), _MAX_ROWS):
        rows = drawn[start : start + _MAX_ROWS]
        is_there = isinstance(uniforms, Tensor)
        values = [[params[row].temperature, params[row].top_p, 0 if is_there else uniforms[row]] for row in rows]
        top_k = [min(params[row].top_k, logits.shape[-1]) for row in rows]
        at, numbers, limits = upload([np.array(rows), np.array(values), np.array(top_k)], logits.device)
        if isinstance(uniforms, Tensor):
            numbers[:, 2] = uniforms.index_select(0, at)
        if logits.is_cuda:
            from dcpmla.runtime.kernels import sampling  # triton exists on Linux only

            sampling.draw(logits, tokens, at, numbers, limits)
        else:
            tokens[at] = draw_tokens(logits[at], numbers, limits)
    return tokens.where(best - best == 0, NOT_FINITE)
