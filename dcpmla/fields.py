"""Rules for the fields of configurations, in their annotations, and one function that names the field that breaks its
rule.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, TypeGuard, get_origin, get_type_hints

LARGEST_SIZE = 1 << 24  # bound on any dim, vocabulary or block; more is a mistake that would run out of memory
_SHOWN = 80  # characters of a value in a message


@dataclass(frozen=True)
class Rule:
    """A rule for a field's value: in words for the message, and as a test that takes a value of any type.

    Attributes:
        choices: All values that it allows besides None, if these are some texts.
        items: Rule of each item of a sequence.
    """

    words: str
    holds: Callable[[object], bool]
    choices: tuple[str, ...] = ()
    items: "Rule | None" = None


def whole(low: int, high: int | None = None) -> Rule:
    """Return the rule of ints from `low` to `high`; no bool, no float."""
    words = f"a whole number of at least {low}" if high is None else f"a whole number in [{low}, {high}]"
    return Rule(words, lambda value: is_whole(value) and low <= value and (high is None or value <= high))


def number(low: float, high: float | None = None, *, above: bool = False) -> Rule:
    """Return the rule of finite numbers from `low` (with `above`, greater than it) to `high`; no bool."""
    if high is None:
        words = f"a finite number {'above' if above else 'of at least'} {low:g}"
    else:
        words = f"a number in {'(' if above else '['}{low:g}, {high:g}]"
    return Rule(
        words,
        lambda value: is_number(value) and (low < value if above else low <= value) and (high is None or value <= high),
    )


def one_of(choices: Sequence[str]) -> Rule:
    """Return the rule of some texts."""
    words = f"one of {', '.join(choices)}"
    return Rule(words, lambda value: isinstance(value, str) and value in choices, tuple(choices))


def only(value: object) -> Rule:
    """Return the rule of a single value, of its own type: 1 is not True."""
    words = repr(value) if isinstance(value, str) else str(value).lower()
    return Rule(words, lambda other: type(other) is type(value) and other == value)


def optional(rule: Rule) -> Rule:
    """Return a rule that takes None, too."""
    return replace(rule, words=f"{rule.words}, or none", holds=lambda value: value is None or rule.holds(value))


def list_of(rule: Rule, length: int | None = None) -> Rule:
    """Return the rule of lists, of any length or the one given, whose items all keep to a rule."""
    words = f"a list{'' if length is None else f' of {length}'}, each {rule.words}"
    return Rule(
        words,
        lambda value: (
            isinstance(value, list)
            and len(value) == (len(value) if length is None else length)
            and all(map(rule.holds, value))
        ),
    )


def instance_of(kind: type) -> Rule:
    """Return the rule of a class's objects."""
    return Rule(f"an {kind.__name__}", lambda value: isinstance(value, kind))


def tuple_of(rule: Rule, at_most: int | None = None) -> Rule:
    """Return the rule of tuples, of any length or up to the one given, whose items all keep to a rule."""
    words, limit = f"a tuple, each {rule.words}", at_most or sys.maxsize
    return Rule(
        words if at_most is None else f"{words}, at most {at_most} items",
        lambda value: isinstance(value, tuple) and len(value) <= limit and all(map(rule.holds, value)),
        items=rule,
    )


def either(first: Rule, second: Rule) -> Rule:
    """Return a rule that takes what either of two takes."""
    return Rule(f"{first.words}, or {second.words}", lambda value: first.holds(value) or second.holds(value))


FLAG = Rule("true or false", lambda value: isinstance(value, bool))
OBJECT = Rule("an object", lambda value: isinstance(value, dict))
TEXT = Rule("text that is not empty", lambda value: isinstance(value, str) and value != "")
SIZE = whole(1, LARGEST_SIZE)
EVEN_SIZE = Rule(
    f"an even number in [2, {LARGEST_SIZE}]", lambda value: is_whole(value) and SIZE.holds(value) and value % 2 == 0
)

Flag = Annotated[bool, FLAG]
Size = Annotated[int, SIZE]
Count = Annotated[int, whole(1)]


@cache
def rules_of(annotated: Callable[..., Any]) -> Mapping[str, Rule]:
    """Return the rules of a dataclass's fields, or of a function's arguments, by name.

    They are in annotations like `block_size: Annotated[int, whole(1)]`.
    """
    hints = get_type_hints(annotated, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if get_origin(hint) is Annotated}


def check_fields(
    rules: Mapping[str, Rule], values: Mapping[str, object], label: Callable[[str], str] = lambda name: name
) -> None:
    """Raise ValueError for the first value that breaks its field's rule, called by the field's label.

    Args:
        values: Values by field name. A value without a rule may be anything; a rule without a value is skipped.
    """
    for name, rule in rules.items():
        if name in values and not rule.holds(values[name]):
            raise ValueError(f"{label(name)} is {_shown(values[name])}; it must be {rule.words}")


def option_label(name: str) -> str:
    """Return a field's name with the option that sets it: "block_size (--block-size)"."""
    return f"{name} (--{name.replace('_', '-')})"


def divisors(number: int) -> list[int]:
    """Return every size from 1 to `number` that divides it."""
    return [size for size in range(1, number + 1) if number % size == 0]


def choices(values: list[int] | tuple[str, ...]) -> str:
    """Return the words that offer values in an error message: "choose 1, 2 or 4"."""
    return (
        "choose " + ", ".join(map(str, values[:-1])) + f" or {values[-1]}" if len(values) > 1 else f"choose {values[0]}"
    )


def check_tp_size(tensor_parallel_size: int, count: int, parts: str) -> None:
    """Raise ValueError, with the sizes that do, unless a TP size divides a number of parts of a model.

    Args:
        parts: Words for the parts, with their number.
    """
    if tensor_parallel_size < 1 or count % tensor_parallel_size:
        raise ValueError(
            f"tensor_parallel_size (-tp) is {tensor_parallel_size}; it must divide {parts}: {choices(divisors(count))}"
        )


def check_experts(num_experts: int, size: int, tensor_parallel_size: int, spreads_experts: bool) -> None:
    """Raise ValueError if experts cannot be cut or spread evenly; other layers may be cut unevenly.

    Args:
        size: Intermediate size of an expert.
    """
    if not spreads_experts:
        check_tp_size(tensor_parallel_size, size, f"the experts' intermediate size {size}")
    elif num_experts % tensor_parallel_size:
        raise ValueError(
            f"enable_expert_parallel (--enable-expert-parallel): {num_experts} experts cannot be spread over "
            f"{tensor_parallel_size} ranks; tensor_parallel_size (-tp) must be one of "
            f"{', '.join(map(str, divisors(num_experts)))}"
        )


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether a value is an int, but not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value is an int or a float, but not a bool, and finite as a float."""
    return (is_whole(value) or isinstance(value, float)) and abs(value) <= sys.float_info.max


def _shown(value: object) -> str:
    text = repr(value[:_SHOWN] if isinstance(value, list | tuple | str) else value)  # A client's list may be long.
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
