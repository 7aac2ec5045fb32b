"""JSON text of arguments that a model writes as texts, by the types that a function's schema allows."""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from dcpmla.runtime.schemas import refer

_MAX_SCHEMAS = 64  # parts of a schema that are looked at for one argument: references may form a circle
_MAX_ITEMS = 64  # items of each list of a part that are looked at
_LONGEST_REFERENCE = 1024  # characters


def dumps(value: object) -> str:
    """Return JSON text with all characters as they are."""
    return json.dumps(value, ensure_ascii=False)


def arguments_of(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of a call of the history. A text that is no JSON object is the argument `arguments`."""
    arguments = call["function"].get("arguments") or {}
    values = object_of(arguments) if isinstance(arguments, str) else arguments
    return values if isinstance(values, Mapping) else {"arguments": arguments}


def object_of(text: str) -> dict[str, Any] | None:
    """Return the JSON object that a text is, None if it is none."""
    with suppress(ValueError, RecursionError):
        value = json.loads(text)
        return value if isinstance(value, dict) else None
    return None


def json_inside(text: str) -> str:
    """Return a text as it is written between the quotes of a JSON string."""
    return dumps(text)[1:-1]


def json_of(text: str, types: frozenset[str]) -> str:
    """Return the JSON text of a value: itself if it is JSON of a type that the schema allows, else a string.

    Args:
        types: Types that the schema allows, none if it does not say.
    """
    stripped = text.strip()
    try:
        value = json.loads(stripped, parse_constant=_reject)
    except (ValueError, RecursionError):
        return dumps(text)
    is_text = "string" in types and (isinstance(value, str) or not types & types_of(value))
    return dumps(text) if is_text else stripped


def schema_types(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """Return the types that a function's schema allows for an argument, none if it does not say.

    Of a long list the first items stand for all: the event loop waits for this.
    """
    properties = schema.get("properties")
    pending: list[Any] = [properties.get(key)] if isinstance(properties, Mapping) else []
    names: set[str] = set()
    for _ in range(_MAX_SCHEMAS):
        if not pending:
            break
        part = pending.pop()
        if not isinstance(part, Mapping):
            continue
        declared = part.get("type")
        names.update(name for name in _items(declared) + [declared] if isinstance(name, str))
        if declared is None:
            names.update(*map(types_of, [*_items(part.get("enum")), *([part["const"]] if "const" in part else [])]))
        pending += [each for union in ("anyOf", "oneOf", "allOf") for each in _items(part.get(union))]
        if isinstance(reference := part.get("$ref"), str) and len(reference) <= _LONGEST_REFERENCE:
            with suppress(LookupError):
                pending.append(refer(schema, reference))
    return frozenset(names)


def _reject(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def types_of(value: object) -> frozenset[str]:
    """Return the types that JSON schema has for a value."""
    if isinstance(value, bool):
        return frozenset(("boolean",))
    if isinstance(value, int):
        return frozenset(("integer", "number"))
    by_class = {float: "number", str: "string", list: "array", dict: "object"}
    return frozenset((by_class.get(type(value), "null"),))


def _items(value: object) -> list[Any]:
    return value[:_MAX_ITEMS] if isinstance(value, list) else []
