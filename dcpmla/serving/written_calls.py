"""Calls of one function in a family's markup, as parts of a grammar: their arguments follow the function's schema."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dcpmla.runtime.schemas import ANNOTATIONS, allows_all_names, alone, refer
from dcpmla.serving.call_grammar import Either, Part, Parts, Pattern, Repeat, Schema, Text
from dcpmla.serving.chat.markup import AnswerFormat, Tags
from dcpmla.serving.chat.values import types_of

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_TYPES = ("string", "number", "boolean", "null", "array", "object")
# Keywords of the schema of all arguments that tags cannot keep to.
_UNWRITTEN = (
    *("$ref", "allOf", "anyOf", "const", "dependencies", "dependentRequired", "dependentSchemas", "else", "enum"),
    *("if", "not", "oneOf", "patternProperties", "propertyNames", "then", "unevaluatedProperties"),
)
_FREE_KEY = Pattern(r'[^<>"&\n]{1,256}')  # of an argument that no schema names
# What a text without a declared type must not be, to be read as a text where another type is allowed.
_READ_AS = {
    "null": r"\s*null\s*",
    "boolean": r"\s*(true|false)\s*",
    "integer": r"\s*-?[0-9](?s:.*)",
    "number": r"\s*-?[0-9](?s:.*)",
    "array": r"\s*\[(?s:.*)",
    "object": r"\s*\{(?s:.*)",
}
_MAX_DEPTH = 64  # references and unions: they may form a circle


class UnwrittenSchema(ValueError):
    """A schema that a family's markup cannot keep to, with the path of the part that is at fault."""

    def __init__(self, path: Sequence[str], words: str) -> None:
        super().__init__(words)
        self.path = list(path)


def written_call(markup: AnswerFormat, name: str, parameters: Mapping[str, Any] | None) -> Parts:
    """Return a call of a function after its opening.

    Args:
        parameters: JSON schema of the arguments, None for a function without any.
    Raises:
        UnwrittenSchema: No form of the family's calls can keep to the schema.
    """
    schema = _NO_ARGUMENTS if parameters is None else {"type": "object", **parameters}
    if schema["type"] != "object":
        raise UnwrittenSchema(["type"], f"it is {str(schema['type'])[:40]!r}; it must be 'object'")
    options, fault = list[Parts](), None
    for start, tags, end in _forms(markup, name):
        try:
            options.append([*start, *_arguments(tags, schema), end])
        except UnwrittenSchema as error:
            fault = error
    if not options and fault is not None:
        raise fault
    return options[0] if len(options) == 1 else [Either(options)]


def free_call(markup: AnswerFormat, name: str) -> Parts:
    """Return a call of a function after its opening, with any arguments."""
    options = [[*start, *_any_arguments(tags), end] for start, tags, end in _forms(markup, name)]
    return options[0] if len(options) == 1 else [Either(options)]


def _forms(markup: AnswerFormat, name: str) -> Iterator[tuple[Parts, Tags | None, str]]:
    """Yield what begins a call after its opening, the markup of its arguments and what ends it, for each form."""
    start, number, after = f"{name}{markup.numbering}{markup.header_end}".partition("{number}")
    begins: Parts = [start, Pattern("[0-9]{1,4}"), after] if number else [start]
    yield begins, markup.tags, markup.after_arguments + markup.call[1]
    if markup.wraps:
        yield [f'\n{{"name": "{name}", "arguments": '], None, f"}}\n{markup.call[1]}"


def _any_arguments(tags: Tags | None) -> Parts:
    if tags is None:
        return [Schema({"type": "object"})]
    values = _argument(replace(tags, start=""), "", _values({}, {}, []))
    options = [[tags.start, _FREE_KEY, *value] for value in values]
    return [Either([[Repeat([Either(options)])], []])]


def _arguments(tags: Tags | None, schema: Mapping[str, Any]) -> Parts:
    """Return all arguments, those by key in the order of the schema."""
    if tags is None:
        return [Schema(schema)]
    for keyword in _UNWRITTEN:
        if keyword in schema and not (keyword == "propertyNames" and allows_all_names(schema[keyword])):
            raise UnwrittenSchema([keyword], "the arguments of this model's calls cannot keep to it")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise UnwrittenSchema([], "properties must be an object, and required a list")
    additional = schema.get("additionalProperties", {})
    unnamed = {key: additional for key in required if key not in properties}
    properties = {**properties, **unnamed}
    if schema.get("minProperties", 0) > len(required) or schema.get("maxProperties", len(properties)) < len(properties):
        raise UnwrittenSchema([], "the arguments of this model's calls cannot keep to minProperties and maxProperties")
    parts: list[Part] = []
    for key, value in properties.items():
        options = list(_argument(tags, key, _values(schema, value, ["properties", key])))
        if key in required and not options:
            path = ["required"] if key in unnamed else ["properties", key]
            raise UnwrittenSchema(path, f"no value satisfies the argument {key[:64]!r}, and it is required")
        if options:
            parts.append(Either(options if key in required else [*options, []]))
    return parts


def _argument(tags: Tags, key: str, values: Sequence[tuple[str, Part]]) -> Iterator[Parts]:
    """Yield an argument with a value of each type."""
    other_kinds = {kind for kind, value in values if not isinstance(value, Text)}
    for kind, value in values:
        start = tags.before_value(key, kind)
        if isinstance(value, Text):
            excludes = () if tags.types else tuple(_READ_AS[other] for other in sorted(other_kinds & _READ_AS.keys()))
            yield [start, value._replace(end=tags.end, excludes=excludes)]
        else:
            yield [start, value, tags.end]


def _values(root: Mapping[str, Any], schema: Any, path: list[str], depth: int = 0) -> list[tuple[str, Part]]:
    """Return the types of a value with the part for each: texts are written as they are, other values as JSON.

    Raises:
        UnwrittenSchema: The schema has texts that the markup cannot keep to.
    """
    if schema is False:
        return []
    schema = {} if schema is True else schema
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        raise UnwrittenSchema(path, "it is no JSON schema, or nested too deep")
    if "$ref" in schema:
        around = {key: value for key, value in schema.items() if key != "$ref"}
        try:
            target = refer(root, schema["$ref"])
        except LookupError:
            words = f"$ref is {str(schema['$ref'])[:100]!r}; it must lead to a part of the function's schema"
            raise UnwrittenSchema(path, words) from None
        return _values(root, _joined(around, target, path), path, depth + 1)
    for union in ("anyOf", "oneOf", "allOf"):
        if union in schema:
            return _union(root, schema, union, path, depth)
    types = schema.get("type", _TYPES)
    types = [types] if isinstance(types, str) else list(types)
    if "enum" in schema or "const" in schema:
        options = [schema["const"]] if "const" in schema else schema["enum"]
        kept = [value for value in options if "type" not in schema or types_of(value) & {*types}]
        return [(min(types_of(value)), value if isinstance(value, str) else json.dumps(value)) for value in kept]
    return [
        (kind, _text(schema, path) if kind == "string" else Schema(alone(root, {**schema, "type": kind})))
        for kind in types
    ]


def _union(
    root: Mapping[str, Any], schema: Mapping[str, Any], union: str, path: list[str], depth: int
) -> list[tuple[str, Part]]:
    """Return the types and parts of a value that is one of several."""
    around, branches = {key: value for key, value in schema.items() if key != union}, schema[union]
    if not isinstance(branches, list) or (union == "allOf" and len(branches) != 1):
        raise UnwrittenSchema([*path, union], "the arguments of this model's calls cannot keep to it")
    values: list[tuple[str, Part]] = []
    for number, branch in enumerate(branches):
        place = [*path, union, str(number)]
        values += _values(root, _joined(around, branch, place), place, depth + 1)
    kinds = ["number" if kind == "integer" else kind for kind, value in values if not isinstance(value, str)]
    if union == "oneOf" and len(set(kinds)) < len(kinds):
        raise UnwrittenSchema([*path, union], "its parts may overlap")
    return values


def _joined(around: Mapping[str, Any], branch: Any, path: list[str]) -> Any:
    """Return a schema with the keywords around it, which must be others."""
    if not isinstance(branch, Mapping):
        return branch
    kept = {key: value for key, value in around.items() if key not in ANNOTATIONS}
    if twice := kept.keys() & branch.keys():
        raise UnwrittenSchema(path, f"{min(twice)} is there twice")
    return {**kept, **branch}


def _text(schema: Mapping[str, Any], path: list[str]) -> Text:
    """Return a text of a schema. Formats are annotations."""
    shortest, longest = schema.get("minLength", 0), schema.get("maxLength", "")
    matches = [] if (shortest, longest) == (0, "") else [f"(?s:.{{{shortest},{longest}}})"]
    if (pattern := schema.get("pattern")) is not None:
        matches.append(_whole(str(pattern), [*path, "pattern"]))
    return Text(matches=matches)


def _whole(pattern: str, path: list[str]) -> str:
    """Return the expression of whole texts in which a pattern is found."""
    begins, ends = pattern.startswith("^"), bool(re.search(r"(?<!\\)(\\\\)*\$$", pattern))
    inner = pattern[begins : len(pattern) - ends]
    if "|" in inner and (begins or ends) and not (begins and ends and re.fullmatch(r"\((?:[^()\\]|\\.)*\)", inner)):
        raise UnwrittenSchema(path, "an anchor and a choice need brackets: ^(a|b)$")
    return f"{'' if begins else '(?s:.*)'}(?:{inner}){'' if ends else '(?s:.*)'}"
