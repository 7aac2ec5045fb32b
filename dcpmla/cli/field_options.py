"""Options of commands made from a dataclass, where each field's name, type, choices, default and text are written."""

import argparse
import inspect
import re
from collections.abc import Collection, Mapping
from dataclasses import Field, fields
from typing import Any, get_args, get_type_hints

from dcpmla.fields import Rule, rules_of

_METAVARS = {int: "N", float: "X", str: "TEXT"}


def add_fields(
    parser: argparse.ArgumentParser,
    kind: type,
    title: str,
    names: Collection[str] | None = None,
    options: Mapping[str, str] | None = None,
    changes: Mapping[str, dict[str, Any]] | None = None,
) -> None:
    """Add a group with an option for each field of a dataclass, in their order. Its help is the field's text in the
    dataclass's docstring, with the default.

    Args:
        kind: Dataclass with rules in its annotations (`rules_of`).
        title: Title of the group in --help.
        names: Names of the fields; None for all.
        options: Names of options that are not the field's: "--dcp-check-exchange" of check_exchange.
        changes: Arguments of `add_argument` in place of those that a field's type and rule give.
    """
    group, rules, types, texts = parser.add_argument_group(title), rules_of(kind), get_type_hints(kind), texts_of(kind)
    for field in fields(kind):
        name = field.name
        if names is None or name in names:
            keywords = (changes or {}).get(name) or _keywords(field, types[name], rules.get(name))
            option = (options or {}).get(name, "--" + name.replace("_", "-"))
            keywords = {"default": field.default, "help": _help(texts.get(name, ""), field.default)} | keywords
            group.add_argument(option, dest=name, **keywords)


def texts_of(kind: type) -> dict[str, str]:
    """Return the text of each field in a dataclass's docstring, on one line."""
    section = re.split(r"^(?:Args|Attributes):\n", inspect.getdoc(kind) or "", maxsplit=1, flags=re.MULTILINE)[-1]
    found = re.findall(r"^ {4}([\w, ]+): (.+(?:\n {8}.+)*)", section.partition("\nRaises:")[0], re.MULTILINE)
    return {name: " ".join(text.split()) for names, text in found for name in names.split(", ")}


def _keywords(field: Field[Any], hint: Any, rule: Rule | None) -> dict[str, Any]:
    """Return the arguments of `add_argument` that say which values an option takes."""
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction if field.default else "store_true"}
    if rule is not None and rule.choices:
        return {"choices": rule.choices}
    (kind,) = (each for each in _METAVARS if each is hint or each in get_args(hint))
    return {"type": kind, "metavar": _METAVARS[kind]}


def _help(text: str, default: object) -> str:
    is_shown = default not in (None, ()) and not isinstance(default, bool)
    return (f"{text} Default: {default}." if is_shown else text).replace("%", "%%")
