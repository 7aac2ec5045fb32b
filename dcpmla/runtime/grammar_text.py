"""Grammars in the notation of llguidance, which compiles them."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import llguidance

from dcpmla.runtime.schemas import Path, allows_all_names, with_inner

# Whitespace is bounded, because some models never stop to write it: an indentation is 8 levels of 4 spaces, or 16 tabs.
# A character has one form, without \u: otherwise a second form of a property's name would be another property.
_OPTIONS: Any = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": r"( |\n( {0,32}|\t{0,16}))?",
    "json_allowed_escapes": 'bfnrt"\\',
    "coerce_one_of": False,
    "lenient": False,
}
# Formats that are enforced. Others are annotations, as the standard has it by default.
_FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"}
_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")  # characters that strings cannot have without \u
# Without this, llguidance looks for all text that must follow, which takes a second and 200 MB for the million letters
# of a{1000}{1000}, and allows only the tokens into which a tokenizer cuts it: also a special token that is spelled so.
_NO_FORCING = '\n%llguidance {"no_forcing": true}'
# A step's work on the host is at most a few milliseconds, and a request's memory about 20 MB.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}
# llguidance shows lines of the grammar, which a JSON schema does not have.
_SHOWN_LINES = re.compile(r"^at \d+\(\d+\): failed to compile JSON schema: |\n +\d+ \| (?s:.*)|\n?<non-verbose/>")


class SchemaFault(ValueError):
    """A schema that cannot be enforced, with the path of the part that is at fault."""

    def __init__(self, path: Path, words: str) -> None:
        super().__init__(": ".join(filter(None, (".".join(map(str, path)), words))))
        self.path, self.words = path, words


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
            lark = f"start: %json {schema_in_grammar({} if schema is True else schema)}"
        case "json_object":
            lark = f"start: %json {schema_in_grammar({'type': 'object'})}"
        case "regex":
            lark = json.loads(llguidance.LLMatcher.grammar_from_regex(text))["grammars"][0]["lark_grammar"]
        case "choice":
            texts = " | ".join(json.dumps(each, ensure_ascii=False) for each in json.loads(text))
            lark = f"start: TEXT\nTEXT: {texts}"  # One terminal costs less than thousands.
        case _:
            lark = llguidance.grammar_from("grammar", text)
    return lark + _NO_FORCING


def compile_grammar(
    vocabulary: llguidance.LLTokenizer, kind: str, text: str, log_level: int = 0
) -> llguidance.LLMatcher:
    """Return a matcher at the beginning of a grammar.

    Args:
        log_level: Level of llguidance's log, which is written to the process's standard error; 0 is none.
    Raises:
        ValueError: The grammar is wrong, has parts that are not supported, or passes a limit.
    """
    limits = llguidance.LLParserLimits(**LIMITS)
    matcher = llguidance.LLMatcher(vocabulary, llguidance_text(kind, text), log_level=log_level, limits=limits)
    if matcher.is_error():
        words = matcher.get_error()
        raise ValueError(words if kind == "grammar" else _SHOWN_LINES.sub("", words))
    return matcher


def read_vocabulary(tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int]) -> llguidance.LLTokenizer:
    """Return the vocabulary of a fast tokenizer of transformers, as llguidance reads it.

    Raises:
        ValueError: The tokenizer is no fast one, or its tokens are no bytes.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError("only fast tokenizers are supported")
    num_tokens = max(vocab_size, len(tokenizer))
    return llguidance.LLTokenizer(tokenizer.backend_tokenizer.to_str(), num_tokens, sorted(eos_token_ids) or None)


def schema_in_grammar(schema: Mapping[str, Any]) -> str:
    """Return a schema as it is written after %json in a grammar.

    Raises:
        SchemaFault: A keyword or a value cannot be enforced.
    """
    return json.dumps({**_served([], schema), "x-guidance": _OPTIONS}, ensure_ascii=False)


def _served(path: Path, schema: Any) -> Any:
    """Return a schema without keywords that change nothing, and without llguidance's own options.

    Args:
        path: Path of the schema in the whole one.
    Raises:
        SchemaFault: A keyword or a value cannot be enforced.
    """
    if not isinstance(schema, Mapping):
        return schema
    least, required = schema.get("minProperties", 0), schema.get("required", [])
    if isinstance(least, int) and isinstance(required, list) and least > len(required):
        words = f"minProperties is {least}, above the {len(required)} required: a name may occur twice"
        raise SchemaFault(path, words)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    for value in values if isinstance(values, list) else []:
        if found := _unwritable(value):
            words = f"{value!r:.60} has the character U+{ord(found):04X}, which answers cannot write"
            raise SchemaFault(path, words)
    kept = {key: value for key, value in schema.items() if key != "x-guidance"}
    named = kept.get("format")
    if isinstance(named, str) and named not in _FORMATS:
        del kept["format"]
    if kept.get("uniqueItems") is False:
        del kept["uniqueItems"]
    if "propertyNames" in kept and allows_all_names(kept["propertyNames"]):
        del kept["propertyNames"]
    return with_inner(kept, lambda steps, part: _served([*path, *steps], part))


def _unwritable(value: Any) -> str:
    """Return the first character of a value's texts that JSON writes with \\u alone; empty without one.

    Names of properties may have them: llguidance writes them as they are given.
    """
    if isinstance(value, str):
        found = _UNWRITABLE.search(value)
        return found[0] if found else ""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next(filter(None, map(_unwritable, inner)), "")
