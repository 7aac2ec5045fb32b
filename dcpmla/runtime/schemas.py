"""JSON schemas as trees: the schemas inside one, and what references lead to."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard
from urllib.parse import unquote

_MAPS = ("properties", "patternProperties", "$defs", "definitions")  # keywords with schemas by name
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "$comment"}
Path = list[str | int]
_INDEX = re.compile(r"0|[1-9][0-9]{0,9}")


def inner_schemas(schema: Any) -> Iterator[tuple[Path, Any]]:
    """Yield the schemas inside a schema, each after its path."""
    for key, value in schema.items() if isinstance(schema, Mapping) else ():
        if key in _MAPS and isinstance(value, Mapping):
            yield from (([key, name], part) for name, part in value.items())
        elif key in (*_LISTS, *_SINGLE) and isinstance(value, list):
            yield from (([key, index], part) for index, part in enumerate(value))
        elif key in _SINGLE:
            yield [key], value


def with_inner(schema: Mapping[str, Any], change: Callable[[Path, Any], Any]) -> dict[str, Any]:
    """Return a copy of a schema with other schemas inside: those that `change` returns for a path and a schema."""
    changed = {key: list(value) if isinstance(value, list) else value for key, value in schema.items()}
    changed |= {key: dict(value) for key, value in schema.items() if key in _MAPS and isinstance(value, Mapping)}
    for path, part in inner_schemas(schema):
        container: Any = changed if len(path) == 1 else changed[str(path[0])]
        container[path[-1]] = change(path, part)
    return changed


def refer(root: Any, reference: str) -> Any:
    """Return the part of a schema that a reference names.

    Raises:
        LookupError: The reference is no JSON pointer into this document, or leads nowhere.
    """
    if not is_local(reference):
        raise LookupError(reference)
    part = root
    for name in map(str, pointer(reference)):
        if isinstance(part, list) and _INDEX.fullmatch(name):
            part = part[int(name)]
        elif isinstance(part, Mapping):
            part = part[name]
        else:
            raise LookupError(reference)
    return part


def pointer(reference: str) -> list[str | int]:
    """Return the names of a reference that is a JSON pointer."""
    return [name.replace("~1", "/").replace("~0", "~") for name in unquote(reference).split("/")[1:]]


def is_local(reference: Any) -> TypeGuard[str]:
    """Return whether a reference is a JSON pointer into its own document."""
    return isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))


def alone(root: Mapping[str, Any], part: Any) -> Any:
    """Return a part of a schema as a schema of its own: what its references lead to becomes definitions of its own.

    References that are no JSON pointers into the root, or lead nowhere, stay as they are.
    """
    names: dict[str, int] = {}  # number of the definition of each reference

    def moved(schema: Any) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        schema = {key: value for key, value in schema.items() if key not in ("$defs", "definitions")}
        if is_local(reference := schema.get("$ref")):
            try:
                refer(root, reference)
            except LookupError:
                return with_inner(schema, lambda _, inner: moved(inner))
            schema["$ref"] = f"#/$defs/{names.setdefault(reference, len(names))}"
        return with_inner(schema, lambda _, inner: moved(inner))

    own, definitions = moved(part), dict[str, Any]()
    while len(definitions) < len(names):
        reference = list(names)[len(definitions)]
        definitions[str(len(definitions))] = moved(refer(root, reference))
    return {**own, "$defs": definitions} if definitions else own


def allows_all_names(schema: Any) -> bool:
    """Return whether a schema of property names allows all names."""
    if isinstance(schema, Mapping):
        types = schema.get("type", "string")
        return schema.keys() <= {"type", *ANNOTATIONS} and (types == "string" or "string" in list(types))
    return schema is True
