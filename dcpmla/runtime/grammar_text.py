"""Grammars in the notation of llguidance, which compiles them, and the fault of one that cannot be compiled.

The server runs this file as a program of its own before any rank compiles a client's grammar (`serving/structured.py`).
So it imports nothing but llguidance and the standard library.
"""

import json
import resource
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import llguidance

# Whitespace is bounded, because some models never stop to write it. A character has one form, without \u: otherwise a
# second form of a property's name would be another property.
_OPTIONS: Any = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": r"( |\n[ \t]{0,64})?",
    "json_allowed_escapes": 'bfnrt"\\',
    "coerce_one_of": False,
    "lenient": False,
}
# Formats that are enforced. Others are annotations, as the standard has it by default.
_FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"}
_MAPS = ("properties", "patternProperties", "$defs", "definitions")  # keywords with schemas by name
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
# A step's work on the host is at most a few milliseconds, and a request's memory about 20 MB.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}
_MAX_ATTEMPTS = 200  # compilations to find a fault
_CPU_SECONDS, _BYTES = 1, 1 << 30  # limits of the program


def llguidance_text(kind: str, text: str) -> str:
    """Return a grammar (`Grammar.kind`, `Grammar.text`) as llguidance reads it.

    Raises:
        ValueError: It cannot be written so.
    """
    match kind:
        case "json_schema":
            schema = json.loads(text)
            if schema is False:
                raise ValueError("no value satisfies the schema false")
            return _of_schema({} if schema is True else schema)
        case "json_object":
            return _of_schema({"type": "object"})
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(text)
        case "choice":
            texts = (json.dumps(each, ensure_ascii=False) for each in json.loads(text))
            return llguidance.LLMatcher.grammar_from_lark("start: " + " | ".join(texts))
    return llguidance.grammar_from("grammar", text)


def compile_grammar(tokenizer: llguidance.LLTokenizer, kind: str, text: str) -> llguidance.LLMatcher:
    """Return a matcher at the beginning of a grammar.

    Raises:
        ValueError: The grammar is wrong, has parts that are not supported, or passes a limit.
    """
    limits = llguidance.LLParserLimits(**LIMITS)
    matcher = llguidance.LLMatcher(tokenizer, llguidance_text(kind, text), log_level=0, limits=limits)
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher


def byte_tokenizer(vocab_size: int) -> llguidance.LLTokenizer:
    """Return a tokenizer whose first 256 tokens are the bytes, and whose others have no text."""

    class Bytes:
        eos_token_id, bos_token_id, special_token_ids = 256, None, [256]
        tokens = [*(bytes([value]) for value in range(256)), b"<end>", *[b""] * (vocab_size - 257)]
        is_tokenizer_wrapper = True

        def __call__(self, text: str | bytes) -> list[int]:
            return list(text.encode() if isinstance(text, str) else text)

    return llguidance.LLTokenizer(Bytes())  # type: ignore[arg-type]


def find_fault(tokenizer: llguidance.LLTokenizer, kind: str, text: str) -> tuple[list[str | int], str] | None:
    """Return the reason why a grammar cannot be compiled, after the path of the innermost part of a schema that cannot
    be compiled by itself; None if it can.
    """
    try:
        compile_grammar(tokenizer, kind, text)
    except (ValueError, RecursionError) as error:
        path, words = list[str | int](), str(error)
        if kind != "json_schema" or not isinstance(root := json.loads(text), dict):
            return path, words
        part, num_left = root, _MAX_ATTEMPTS
        definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
        while (wrong := _wrong_part(tokenizer, part, definitions, num_left)) is not None:
            steps, part, words, num_left = wrong
            path += steps
            keyword, _, name = str(part.get("$ref") if isinstance(part, dict) else "").removeprefix("#/").partition("/")
            if name in definitions.get(keyword, {}):
                path, part = [keyword, name], definitions[keyword][name]
        return path, words
    return None


def _wrong_part(
    tokenizer: llguidance.LLTokenizer, schema: Any, definitions: dict[str, Any], num_left: int
) -> tuple[list[str | int], Any, str, int] | None:
    """Return the first part of a schema that cannot be compiled: its path, itself, the reason, the attempts left."""
    for path, part in _parts(schema):
        if num_left == 0:
            return None
        num_left -= 1
        alone = {**definitions, **part} if isinstance(part, dict) else part
        if alone == {**definitions, **schema}:
            continue
        try:
            compile_grammar(tokenizer, "json_schema", json.dumps(alone))
        except (ValueError, RecursionError) as error:
            if part is not False:  # it forbids a property
                return path, part, str(error), num_left
    return None


def schema_in_grammar(schema: dict[str, Any]) -> str:
    """Return a schema as it is written after %json in a grammar.

    Raises:
        ValueError: A keyword cannot be enforced.
    """
    return json.dumps({**_served(schema), "x-guidance": _OPTIONS}, ensure_ascii=False)


def _of_schema(schema: dict[str, Any]) -> str:
    return llguidance.LLMatcher.grammar_from_json_schema(_served(schema), overrides=_OPTIONS)


def _served(schema: Any) -> Any:
    """Return a schema without formats that are not enforced, and without llguidance's own options.

    Raises:
        ValueError: A keyword cannot be enforced.
    """
    if not isinstance(schema, dict):
        return schema
    least, required = schema.get("minProperties", 0), schema.get("required", [])
    if isinstance(least, int) and isinstance(required, list) and least > len(required):
        raise ValueError(f"minProperties is {least}, above the {len(required)} required: a name may occur twice")
    kept = {key: value for key, value in schema.items() if key != "x-guidance"}
    named = kept.get("format")
    if isinstance(named, str) and named not in _FORMATS:
        del kept["format"]
    for key, value in kept.items():
        if key in _MAPS and isinstance(value, Mapping):
            kept[key] = {name: _served(part) for name, part in value.items()}
        elif key in _LISTS and isinstance(value, list):
            kept[key] = [_served(part) for part in value]
        elif key in _SINGLE:
            kept[key] = [_served(part) for part in value] if isinstance(value, list) else _served(value)
    return kept


def _parts(schema: Any) -> Iterator[tuple[list[str | int], Any]]:
    """Yield the schemas inside a schema, each after its path."""
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            yield from (([key, name], part) for name, part in value.items())
        elif isinstance(value, list) and key in (*_LISTS, *_SINGLE):
            yield from (([key, index], part) for index, part in enumerate(value))
        elif key in _SINGLE and isinstance(value, dict):
            yield [key], value


def main() -> None:
    """Read {kind, text, vocab_size} as JSON, and print [path, reason] or null, within limits of time and memory."""
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (_BYTES, _BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    order = json.load(sys.stdin)
    print(json.dumps(find_fault(byte_tokenizer(order["vocab_size"]), order["kind"], order["text"])))


if __name__ == "__main__":
    main()
