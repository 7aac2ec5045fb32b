"""Grammars of texts in a family's markup, and of calls in it whose arguments follow the function's schema."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from dcpmla.runtime.grammar import Grammar
from dcpmla.runtime.grammars import check_extra
from dcpmla.runtime.schemas import ANNOTATIONS, allows_all_names, alone, refer
from dcpmla.serving.chat.markup import AnswerFormat, Tags
from dcpmla.serving.chat.values import types_of

EMPTY = '""'  # the expression of no text
_ANY = "(?s:.*)"
_NO_ARGUMENTS: Mapping[str, Any] = {"properties": {}, "additionalProperties": False}
_TYPES = ("string", "number", "boolean", "null", "array", "object")
# Keywords of the schema of all arguments that tags cannot keep to.
_UNWRITTEN = (
    *("$ref", "allOf", "anyOf", "const", "dependencies", "dependentRequired", "dependentSchemas", "else", "enum"),
    *("if", "not", "oneOf", "patternProperties", "propertyNames", "then", "unevaluatedProperties"),
)
_NUMBER = "/[0-9]{1,4}/"
_FREE_KEY = r'/[^<>"&\n]{1,256}/'  # of an argument that no schema names
# What a text without a declared type must not be, to be read as a text where another type is allowed.
_READ_AS = {
    "null": r"\s*null\s*",
    "boolean": r"\s*(true|false)\s*",
    "integer": r"\s*-?[0-9](?s:.*)",
    "number": r"\s*-?[0-9](?s:.*)",
    "array": r"\s*\[(?s:.*)",
    "object": r"\s*\{(?s:.*)",
}
_BRANCHED = ("$ref", "anyOf", "oneOf", "allOf")  # keywords of schemas that lead to others
_MAX_DEPTH = 64  # references and unions: they may form a circle
_Value = str | tuple[str, ...] | Mapping[str, Any]  # one text, texts that expressions match, or JSON of a schema


class UnwrittenSchema(ValueError):
    """A schema that a family's markup cannot keep to, with the path of the part that is at fault."""

    def __init__(self, path: Sequence[str], words: str) -> None:
        super().__init__(words)
        self.path = list(path)


class GrammarWriter:
    """A grammar in llguidance's dialect of Lark, written expression by expression.

    Args:
        special_tokens: Ids of the vocabulary's special tokens, by text: these are tokens of their own in the markup.
    Raises:
        ValueError: The extra structured is not installed.
    """

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        check_extra()
        self._names: dict[str, str] = {}  # the rule of each expression
        self._ids = special_tokens
        longest_first = sorted(special_tokens, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if special_tokens else None

    def grammar(self, start: str) -> Grammar:
        """Return the grammar of an expression."""
        rules = (f"{name}: {expression}" for expression, name in self._names.items())
        return Grammar("grammar", "\n".join([f"start: {start}", *rules]))

    def literal(self, text: str) -> str:
        """Return the expression of a text with special tokens."""
        return " ".join(map(self._literal, self._pieces(text)))

    def json(self, schema: Mapping[str, Any]) -> str:
        """Return the expression of a JSON value.

        Raises:
            ValueError: The schema has a keyword that cannot be enforced.
        """
        from dcpmla.runtime.grammar_text import schema_in_grammar

        return f"%json {schema_in_grammar(dict(schema))}"

    def text(self, end: str = "", matches: Sequence[str] = (), excludes: Iterable[str] = ()) -> str:
        """Return the expression of a text without special tokens, up to and including its first `end`.

        The text and the end up to its first special token are one lexeme: the longest one counts, and nothing but the
        special token ends it. So the text may have the beginning of its end.

        Args:
            end: Text after the text; an empty end is none.
            matches: Regular expressions that all match the whole text before the end.
            excludes: Regular expressions that must not match it.
        """
        pieces = self._pieces(end)
        number = next((number for number, piece in enumerate(pieces) if piece in self._ids), len(pieces))
        begun = as_regex("".join(pieces[:number]))
        terms = [f"/{_in_slashes(f'(?:{regex}){begun}')}/" for regex in matches or [_ANY]]
        terms += [f"~/{_in_slashes(f'(?:{regex}){begun}')}/" for regex in excludes]
        if end:
            after = _ANY if number < len(pieces) else "(?s:.+)"
            terms.append(f"~/{_in_slashes(_ANY + as_regex(end) + after)}/")
        return sequence(self._rule("T", " & ".join(terms)), *map(self._literal, pieces[number:]))

    def repeated(self, one: str, between: str = "", limit: int | None = None) -> str:
        """Return an expression that is repeated, at least once, with another one between two repetitions.

        Args:
            limit: Limit of repetitions; None is none.
        """
        one = self._rule("r", one)
        if limit == 1:
            return one
        return f"{one} ({sequence(between, one)}){'*' if limit is None else f'{{0,{limit - 1}}}'}"

    def _pieces(self, text: str) -> list[str]:
        """Return a text's special tokens, and the texts around them."""
        return [piece for piece in ([text] if self._split is None else self._split.split(text)) if piece]

    def _literal(self, piece: str) -> str:
        return f"<[{self._ids[piece]}]>" if piece in self._ids else json.dumps(piece, ensure_ascii=False)

    def _rule(self, prefix: str, expression: str) -> str:
        """Return the name of a rule; equal ones have one."""
        return self._names.setdefault(expression, f"{prefix}{len(self._names)}")


def sequence(*expressions: str) -> str:
    """Return the expression of others one after the other."""
    return " ".join(filter(None, expressions)) or EMPTY


def either(options: Iterable[str]) -> str:
    """Return the expression of one of several."""
    return f"({' | '.join(options)})"


def as_regex(text: str) -> str:
    """Return the regular expression of a text, in one line."""
    return "".join(r"\n" if each == "\n" else each if each in "<> " else re.escape(each) for each in text)


def _in_slashes(regex: str) -> str:
    """Return a regular expression with its unescaped slashes escaped."""
    return re.sub(r"\\.|/", lambda match: r"\/" if match[0] == "/" else match[0], regex, flags=re.DOTALL)


def write_call(writer: GrammarWriter, markup: AnswerFormat, function: Mapping[str, Any], *, is_free: bool) -> str:
    """Return the expression of a function's call after its opening.

    Args:
        function: Name and maybe the JSON schema of the parameters; a function without it has none.
        is_free: Whether the arguments may be any.
    Raises:
        UnwrittenSchema: No form of the family's calls can keep to the schema.
        ValueError: The schema has a keyword that cannot be enforced.
    """
    schema = {"type": "object"} if is_free else {"type": "object", **function.get("parameters", _NO_ARGUMENTS)}
    if schema["type"] != "object":
        raise UnwrittenSchema(["type"], f"it is {str(schema['type'])[:40]!r}; it must be 'object'")
    options, fault = list[str](), None
    for start, tags, end in _forms(writer, markup, function["name"]):
        try:
            if tags is None:
                arguments = writer.json(schema)
            else:
                arguments = _any_arguments(writer, tags) if is_free else _arguments(writer, tags, schema)
            options.append(sequence(start, arguments, end))
        except UnwrittenSchema as error:
            fault = error
    if fault is not None and not options:
        raise fault
    return either(options)


def _forms(writer: GrammarWriter, markup: AnswerFormat, name: str) -> Iterator[tuple[str, Tags | None, str]]:
    """Yield what begins a call after its opening, the markup of its arguments and what ends it, for each form."""
    before, number, after = f"{name}{markup.numbering}{markup.header_end}".partition("{number}")
    start = sequence(writer.literal(before), _NUMBER if number else "", writer.literal(after))
    yield start, markup.tags, writer.literal(markup.after_arguments + markup.call[1])
    if markup.wraps:
        start, end = f'\n{{"name": "{name}", "arguments": ', f"}}\n{markup.call[1]}"
        yield writer.literal(start), None, writer.literal(end)


def _arguments(writer: GrammarWriter, tags: Tags, schema: Mapping[str, Any]) -> str:
    """Return the expression of all arguments by key, in the order of the schema."""
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
    valued = dict[str, list[tuple[str, _Value]]]()
    for key, value in properties.items():
        valued[key] = _values(schema, value, ["properties", key])
        if key in required and not valued[key]:
            path = ["required"] if key in unnamed else ["properties", key]
            raise UnwrittenSchema(path, f"no value satisfies the argument {key[:64]!r}, and it is required")
    return " ".join(
        either([*_argument(writer, tags, values, key), *([] if key in required else [EMPTY])])
        for key, values in valued.items()
        if values
    )


def _any_arguments(writer: GrammarWriter, tags: Tags) -> str:
    """Return the expression of all arguments, whatever they are."""
    key = sequence(writer.literal(tags.start), _FREE_KEY)
    options = (sequence(key, value) for value in _argument(writer, tags, _values({}, {}, [])))
    return either([writer.repeated(either(options)), EMPTY])


def _argument(
    writer: GrammarWriter, tags: Tags, values: Sequence[tuple[str, _Value]], key: str | None = None
) -> Iterator[str]:
    """Yield the expressions of an argument with a value of each type; without a key, of what follows it."""
    other_kinds = {kind for kind, value in values if not isinstance(value, tuple)}
    for kind, value in values:
        start = writer.literal(tags.after_key(kind) if key is None else tags.before_value(key, kind))
        match value:
            case tuple():
                others = () if tags.types else sorted(other_kinds & _READ_AS.keys())
                yield sequence(start, writer.text(tags.end, value, [_READ_AS[other] for other in others]))
            case str():
                yield sequence(start, writer.literal(value), writer.literal(tags.end))
            case _:
                yield sequence(start, writer.json(value), writer.literal(tags.end))


def _values(root: Mapping[str, Any], schema: Any, path: list[str], depth: int = 0) -> list[tuple[str, _Value]]:
    """Return the types of a value with what may be written for each.

    Args:
        root: Schema of all arguments, into which references lead.
        path: Path of the value's schema in it.
    Raises:
        UnwrittenSchema: The schema has texts that the markup cannot keep to.
    """
    if schema is False:
        return []
    schema = {} if schema is True else schema
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        raise UnwrittenSchema(path, "it is no JSON schema, or nested too deep")
    if keyword := next((word for word in _BRANCHED if word in schema), None):
        return _branches(root, schema, keyword, path, depth)
    types = schema.get("type", _TYPES)
    types = [types] if isinstance(types, str) else list(types)
    if "enum" in schema or "const" in schema:
        options = [schema["const"]] if "const" in schema else schema["enum"]
        kept = [value for value in options if "type" not in schema or types_of(value) & {*types}]
        return [(min(types_of(value)), value if isinstance(value, str) else json.dumps(value)) for value in kept]
    return [
        (kind, _expressions(schema, path) if kind == "string" else alone(root, {**schema, "type": kind}))
        for kind in types
    ]


def _branches(
    root: Mapping[str, Any], schema: Mapping[str, Any], keyword: str, path: list[str], depth: int
) -> list[tuple[str, _Value]]:
    """Return what `_values` does of a value whose schema is elsewhere, or one of several.

    The keywords around it must be others than its own.
    """
    around = {key: value for key, value in schema.items() if key != keyword and key not in ANNOTATIONS}
    if keyword == "$ref":
        try:
            branches = [(path, refer(root, schema["$ref"]))]
        except LookupError:
            words = f"$ref is {str(schema['$ref'])[:100]!r}; it must lead to a part of the function's schema"
            raise UnwrittenSchema(path, words) from None
    elif not isinstance(schema[keyword], list) or (keyword == "allOf" and len(schema[keyword]) != 1):
        raise UnwrittenSchema([*path, keyword], "the arguments of this model's calls cannot keep to it")
    else:
        branches = [([*path, keyword, str(number)], branch) for number, branch in enumerate(schema[keyword])]
    values: list[tuple[str, _Value]] = []
    for place, branch in branches:
        if isinstance(branch, Mapping):
            if twice := around.keys() & branch.keys():
                raise UnwrittenSchema(place, f"{min(twice)} is there twice")
            branch = {**around, **branch}
        values += _values(root, branch, place, depth + 1)
    kinds = ["number" if kind == "integer" else kind for kind, value in values if not isinstance(value, str)]
    if keyword == "oneOf" and len(set(kinds)) < len(kinds):
        raise UnwrittenSchema([*path, keyword], "its parts may overlap")
    return values


def _expressions(schema: Mapping[str, Any], path: list[str]) -> tuple[str, ...]:
    """Return the expressions that match a text of a schema. Formats are annotations."""
    shortest, longest = schema.get("minLength", 0), schema.get("maxLength", "")
    lengths = () if (shortest, longest) == (0, "") else (f"(?s:.{{{shortest},{longest}}})",)
    pattern = schema.get("pattern")
    return lengths if pattern is None else (*lengths, _whole(str(pattern), [*path, "pattern"]))


def _whole(pattern: str, path: list[str]) -> str:
    """Return the expression of whole texts in which a pattern is found."""
    begins, ends = pattern.startswith("^"), bool(re.search(r"(?<!\\)(\\\\)*\$$", pattern))
    inner = pattern[begins : len(pattern) - ends]
    if "|" in inner and (begins or ends) and not (begins and ends and re.fullmatch(r"\((?:[^()\\]|\\.)*\)", inner)):
        raise UnwrittenSchema(path, "an anchor and a choice need brackets: ^(a|b)$")
    return f"{'' if begins else '(?s:.*)'}(?:{inner}){'' if ends else '(?s:.*)'}"
