"""Options of commands made from a dataclass, where each field's name, type, choices, default and text are written."""

import argparse
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, fields
from typing import Any, get_args, get_type_hints

from dcpmla.fields import Rule, rules_of

_METAVARS = {int: "N", float: "X"}


def add_fields(
    parser: argparse.ArgumentParser,
    kind: type,
    title: str,
    names: Collection[str] | None = None,
    options: Mapping[str, str] | None = None,
    changes: Mapping[str, dict[str, Any]] | None = None,
    aliases: Mapping[str, str] | None = None,
) -> None:
    """Add a group with an option for each field of a dataclass, in their order. Its help is the field's text in the
    dataclass's docstring, with the default.

    Args:
        kind: Dataclass with rules in its annotations (`rules_of`).
        title: Title of the group in --help.
        names: Names of the fields; None for all.
        options: Names of options that are not the field's: "--dcp-check-exchange" of check_exchange.
        changes: Arguments of `add_argument` that a field's type, rule and default do not give.
        aliases: Further names of options.
    """
    group, rules, types, texts = parser.add_argument_group(title), rules_of(kind), get_type_hints(kind), texts_of(kind)
    for field in fields(kind):
        name = field.name
        if names is None or name in names:
            keywords = _keywords(field, types[name], rules.get(name)) | (changes or {}).get(name, {})
            flags = [(options or {}).get(name, "--" + name.replace("_", "-"))]
            if aliases and name in aliases:
                flags.append(aliases[name])
            group.add_argument(*flags, dest=name, help=texts.get(name, "").replace("%", "%%"), **keywords)


def texts_of(kind: type) -> dict[str, str]:
    """Return the text of each field in a dataclass's docstring, on one line."""
    section = re.split(r"^(?:Args|Attributes):\n", inspect.getdoc(kind) or "", maxsplit=1, flags=re.MULTILINE)[-1]
    found = re.findall(r"^ {4}([\w, ]+): (.+(?:\n {8}.+)*)", section.partition("\nRaises:")[0], re.MULTILINE)
    return {name: " ".join(text.split()) for names, text in found for name in names.split(", ")}


def _keywords(field: Field[Any], hint: Any, rule: Rule | None) -> dict[str, Any]:
    """Return the arguments of `add_argument` for an option's default, and for the values that it takes."""
    keywords: dict[str, Any] = {"default": None if field.default is MISSING else field.default}
    if hint is bool:
        return keywords | {"action": argparse.BooleanOptionalAction if field.default else "store_true"}
    if rule is not None and rule.choices:
        return keywords | {"choices": rule.choices}
    kind = _scalar(hint)
    if rule is not None and rule.items is not None:
        keywords |= {"nargs": "+", "type": reader(rule.items, kind)}
    else:  # floats and texts are checked by the dataclass
        keywords["type"] = reader(rule) if kind is int and rule is not None else kind
    return keywords | {"metavar": _METAVARS.get(kind) or field.name.rpartition("_")[2].upper()}


def _scalar(hint: Any) -> Any:
    """Return the type of an option's values: int of `int | None`, str of `Sequence[str]`."""
    return hint if hint in (int, float, str) else next(filter(None, map(_scalar, get_args(hint))), None)


def values_of(kind: type, args: argparse.Namespace) -> dict[str, Any]:
    """Return the values of a dataclass's fields that have options."""
    return {field.name: getattr(args, field.name) for field in fields(kind) if hasattr(args, field.name)}


def list_reader(rule: Rule, kind: type = int) -> Callable[[str], list[Any]]:
    """Return a function that reads values separated by commas for argparse, and checks each by a rule."""
    read = reader(rule, kind)
    return lambda text: [read(item.strip()) for item in text.split(",")]


def reader(rule: Rule, kind: type = int) -> Callable[[str], Any]:
    """Return a function that reads a value for argparse, and checks it by its rule."""

    def read(text: str) -> Any:
        value: Any = text
        if kind is not int or text.removeprefix("-").isdecimal():
            with suppress(ValueError):
                value = kind(text)
        if not rule.holds(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {rule.words}")
        return value

    return read
