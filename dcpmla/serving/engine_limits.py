"""Limits of what a request may ask of the engine, on every route (`check_params`)."""

from collections.abc import Mapping

from dcpmla.fields import Rule, check_fields, number, optional, tuple_of, whole
from dcpmla.runtime.grammar import Grammar
from dcpmla.runtime.sampling import SamplingParams
from dcpmla.serving.errors import as_api_error
from dcpmla.serving.messages import Started
from dcpmla.serving.structured import MAX_CHARACTERS, GrammarChecks

MAX_LOGPROBS = 20  # alternatives of a token
MAX_TOKENS = 1 << 31
_MAX_STOPS = 16
_MAX_STOP_CHARACTERS = 256  # A stop string's length is work at every token, for all requests.
_MAX_STOP_TOKENS = 256
_MAX_WRITTEN = 1 << 20  # characters of a grammar of calls; larger ones take more time than a check has
_MAX_MARKER = 64  # tokens

_PENALTY = number(-2, 2)
_NUM_LOGPROBS = optional(whole(0, MAX_LOGPROBS))


def _is_stop(value: object) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= _MAX_STOP_CHARACTERS


def _is_short(value: object) -> bool:
    """Return whether a grammar is short. A grammar of calls is written here, and longer than a client's own."""
    if not isinstance(value, Grammar):
        return False
    limit = _MAX_WRITTEN if value.kind == "grammar" else MAX_CHARACTERS
    return len(value.text) <= limit and len(value.starts_after) <= _MAX_MARKER


# Fields that are not here have the limits of `SamplingParams`.
LIMITS: Mapping[str, Rule] = {
    "max_new_tokens": whole(1, MAX_TOKENS),
    "min_tokens": whole(0, MAX_TOKENS),
    "top_k": whole(0, MAX_TOKENS),
    "stop": Rule(
        f"at most {_MAX_STOPS} strings of 1 to {_MAX_STOP_CHARACTERS} characters",
        tuple_of(Rule("", _is_stop), _MAX_STOPS).holds,
    ),
    "stop_token_ids": Rule(
        f"at most {_MAX_STOP_TOKENS} token ids below 2^31", tuple_of(whole(0, MAX_TOKENS - 1), _MAX_STOP_TOKENS).holds
    ),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "logprobs": _NUM_LOGPROBS,
    "prompt_logprobs": _NUM_LOGPROBS,
    "grammar": optional(
        Rule(
            f"at most {MAX_CHARACTERS:,} characters ({_MAX_WRITTEN:,} of kind grammar) after {_MAX_MARKER} tokens",
            _is_short,
        )
    ),
}


async def check_params(params: SamplingParams, grammar_source: str, model: Started, checks: GrammarChecks) -> None:
    """Check the parameters of a request before any rank gets it. All routes to the engine call this.

    Args:
        grammar_source: Path of the field that has the grammar.
    Raises:
        ApiError: A parameter is beyond its limit, has a token that the model does not have, or is a grammar that
            cannot be served.
    """
    with as_api_error():
        check_fields(LIMITS, vars(params))
        params.check_vocabulary(model.vocab_size)
    await checks.check(params.grammar, grammar_source, model)
