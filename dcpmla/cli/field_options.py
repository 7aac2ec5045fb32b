"""Options of commands made from a dataclass, where each field's name, type, choices, default and text are written."""

import argparse
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import Field, fields
from typing import Any, get_args, get_type_hints

from dcpmla.fields import Rule, rules_of

_READERS: tuple[type, ...] = (int, float, str)


def add_fields(
    parser: argparse.ArgumentParser,
    kind: type,
    title: str,
    *,
    leave_out: Collection[str] = (),
    options: Mapping[str, str] | None = None,
    readers: Mapping[str, Callable[[str], object]] | None = None,
    more_choices: Mapping[str, tuple[str, ...]] | None = None,
) -> None:
    """Add a group with an option for each field of a dataclass, in their order; --help shows each default.

    Args:
        kind: Dataclass whose docstring has a text for each field, and whose annotations have rules (`rules_of`).
        title: Title of the group in --help.
        leave_out: Fields without an option.
        options: Names of options that are not the field's: "--dcp-check-exchange" of check_exchange.
        readers: Functions that read a value, in place of the field's type.
        more_choices: Values that the dataclass takes in addition to its rule's.
    """
    group, rules, types, texts = parser.add_argument_group(title), rules_of(kind), get_type_hints(kind), texts_of(kind)
    options, readers, more_choices = options or {}, readers or {}, more_choices or {}
    for field in fields(kind):
        name = field.name
        if name in leave_out:
            continue
        keywords = _keywords(field, types[name], rules.get(name), readers.get(name), more_choices.get(name, ()))
        option = options.get(name, "--" + name.replace("_", "-"))
        group.add_argument(
            option, dest=name, default=field.default, help=_help(texts.get(name, ""), field.default), **keywords
        )


def texts_of(kind: type) -> dict[str, str]:
    """Return the text of each field in a dataclass's docstring, on one line."""
    section = inspect.getdoc(kind) or ""
    section = section.partition("Attributes:\n")[2].partition("\nRaises:")[0]
    found = re.findall(r"^ {4}([\w, ]+): (.+(?:\n {8}.+)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for names, text in found for name in names.split(", ")}


def _keywords(
    field: Field[Any], hint: Any, rule: Rule | None, reader: Callable[[str], object] | None, more: tuple[str, ...]
) -> dict[str, Any]:
    """Return the arguments of `add_argument` that say which values an option takes."""
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction if field.default else "store_true"}
    if rule is not None and rule.choices:
        return {"choices": (*rule.choices, *more)}
    (kind,) = (each for each in _READERS if each is hint or each in get_args(hint))
    return {"type": reader or kind, "metavar": "TEXT" if kind is str else "N" if kind is int else "X"}


def _help(text: str, default: object) -> str:
    shown = "" if default is None or isinstance(default, bool) else f" Default: {default}."
    return (text + shown).replace("%", "%%")
