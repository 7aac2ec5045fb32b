"""The form of logit_bias: numbers that are added to the logits of tokens."""

from collections.abc import Mapping

from dcpmla.fields import Rule, is_number, is_whole, number, whole

_LARGEST = 100.0
_MAX_TOKENS = 1024
_MAX_DIGITS = 20


def bias_pairs(biases: object) -> object:
    """Return logit_bias as pairs in the order of the ids, or unchanged if that is impossible."""
    pairs = list(biases.items()) if isinstance(biases, Mapping) else biases
    if not isinstance(pairs, list | tuple) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs
    ):
        return biases
    numbers = [(int(token) if _is_decimal(token) else token, bias) for token, bias in pairs]
    return tuple(sorted(numbers)) if all(is_whole(token) and is_number(bias) for token, bias in numbers) else biases


def _is_decimal(token: object) -> bool:
    return isinstance(token, str) and token.isdecimal() and len(token) < _MAX_DIGITS


def _are_biases(value: object) -> bool:
    """Return whether a value is pairs of `bias_pairs`, few enough and in range."""
    if not isinstance(value, tuple) or len(value) > _MAX_TOKENS or not all(isinstance(pair, tuple) for pair in value):
        return False
    ids, numbers = [token for token, _ in value], [bias for _, bias in value]
    are_allowed = all(map(whole(0).holds, ids)) and all(map(number(-_LARGEST, _LARGEST).holds, numbers))
    return are_allowed and len(set(ids)) == len(ids)


BIASES = Rule(
    f"at most {_MAX_TOKENS:,} different token ids, each with a number in [-{_LARGEST:g}, {_LARGEST:g}]", _are_biases
)
