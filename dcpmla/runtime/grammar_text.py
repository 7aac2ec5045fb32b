"""Grammars in the notation of llguidance, which compiles them, and their check before any rank does (`find_fault`):
whether texts satisfy a client's grammar, at bounded cost.

The check runs in a process of its own (`serving/worker.py`): a hostile grammar may take all of its time and memory, and
llguidance's log is its standard error.
"""

import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import llguidance
import numpy as np

from dcpmla.runtime.schemas import Path, allows_all_names, alone, inner_schemas, is_local, pointer, refer, with_inner

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
_MASK_SECONDS = 0.1  # processor time of one mask: 25 times what the limits are to allow
_NUM_WALKS, _NUM_STEPS, _WALK_SECONDS = 6, 48, 0.2  # walks, their tokens, and the processor time of all
_SEARCH_SECONDS = 0.4  # processor time for finding the part that is at fault
_CLOSING = '"}]>'  # These letters end texts and lists, so that a walk comes to what follows.
_NOTHING = "NoExtensionBias"  # llguidance's word for a mask without tokens
_MAX_WORDS = 500  # characters of a reason
_LOG_LEVEL = 3  # The log then has all rules.
_STANDARD_ERROR = 2


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


def find_fault(vocabulary: llguidance.LLTokenizer, kind: str, text: str) -> tuple[Path, str] | None:
    """Return the reason why a grammar cannot be served, after the path of the innermost part of a schema that cannot
    be served by itself; None if it can.
    """
    try:
        _check(vocabulary, kind, text)
    except SchemaFault as fault:
        return fault.path, fault.words
    except (ValueError, RecursionError) as error:
        root = json.loads(text) if kind == "json_schema" else None
        path, words = _innermost(vocabulary, root, str(error)) if isinstance(root, dict) else ([], str(error))
        return path, words[:_MAX_WORDS]
    return None


def _innermost(vocabulary: llguidance.LLTokenizer, root: dict[str, Any], words: str) -> tuple[Path, str]:
    """Return the path and the fault of the innermost part of a schema that has one by itself."""
    path, until = list[str | int](), time.process_time() + _SEARCH_SECONDS
    seen, pending = {str(path)}, _parts(root, path, root)
    while time.process_time() < until and (found := next(pending, None)) is not None:
        steps, part = found
        if part is False or str(steps) in seen:  # False forbids a property.
            continue
        seen.add(str(steps))
        try:
            _check(vocabulary, "json_schema", json.dumps(alone(root, part)))
        except (ValueError, RecursionError) as error:
            path, words, pending = steps, str(error), _parts(root, steps, part)
    return path, words


def _parts(root: dict[str, Any], path: Path, schema: Any) -> Iterator[tuple[Path, Any]]:
    """Yield the schemas inside a schema, each after its path. Where one is a reference, it is what that leads to."""
    for steps, part in [([], schema), *inner_schemas(schema)]:
        reference = part.get("$ref") if isinstance(part, dict) else None
        with suppress(LookupError):
            if is_local(reference):
                yield pointer(reference), refer(root, reference)
                continue
        yield [*path, *steps], part


def _check(vocabulary: llguidance.LLTokenizer, kind: str, text: str) -> None:
    """Raise ValueError if a grammar cannot be compiled, if no text satisfies a part of it, or if it costs too much."""
    log = os.memfd_create("log")
    os.dup2(log, _STANDARD_ERROR)
    with open(log, encoding="utf-8", errors="replace") as lines:
        compile_grammar(vocabulary, kind, text, _LOG_LEVEL)
        lines.seek(0)
        endless = _endless_rules(lines)
    if endless:
        rule = f"the rule {endless[0]!r}" if kind == "grammar" else "a part of it"
        raise ValueError(f"no text satisfies it: {rule} always needs itself again")
    _walk(vocabulary, compile_grammar(vocabulary, kind, text))


def _endless_rules(log: Iterable[str]) -> list[str]:
    """Return the symbols of a compiled grammar that the start can come to and that no text satisfies.

    A symbol ends if one of its rules has symbols that end; symbols without rules are lexemes and tokens.

    Args:
        log: llguidance's log of the compilation, whose last grammar is the one that it follows.
    """
    rules = dict[str, list[list[str]]]()
    name = ""
    for line in log:
        if line.startswith("Grammar:"):
            rules.clear()
        left, arrow, right = line.partition(" ⇦ ")
        if arrow:
            name = left.strip() or name
            rules.setdefault(name, []).append(right.split())
    ends, num_known = set[str](), -1
    while num_known < len(ends):
        num_known = len(ends)
        for name, options in rules.items():
            if any(all(each in ends or each not in rules for each in option) for option in options):
                ends.add(name)
    reached, pending = set[str](), ["start"]
    while pending:
        name = pending.pop()
        if name in rules and name not in reached:
            reached.add(name)
            pending += [each for option in rules[name] for each in option]
    return sorted(reached - ends)


@cache
def closing_tokens(vocabulary: llguidance.LLTokenizer) -> "np.ndarray[Any, np.dtype[np.bool_]]":
    """Return which tokens [vocab] lead a random text on: special tokens, and ends of texts and lists."""
    closing = np.zeros(vocabulary.vocab_size, dtype=np.bool_)
    closing[[token for token in range(vocabulary.vocab_size) if vocabulary.is_special_token(token)]] = True
    closing[[token for letter in _CLOSING for token in vocabulary.greedy_tokenize(letter)]] = True
    return closing


def _walk(vocabulary: llguidance.LLTokenizer, matcher: llguidance.LLMatcher) -> None:
    """Follow random texts of a grammar.

    Raises:
        ValueError: A mask passes a limit, takes too long, or allows no token.
    """
    chooser, until = np.random.default_rng(0), time.process_time() + _WALK_SECONDS
    closing = closing_tokens(vocabulary)
    for _ in range(_NUM_WALKS):
        walk = matcher.deep_copy()
        for num_tokens in range(_NUM_STEPS):
            begun = time.thread_time()
            bits = walk.compute_bitmask()
            if walk.is_error():
                words = walk.get_error().partition("\n")[0].replace(_NOTHING, "no token continues it")
                raise ValueError(f"a text of it cannot go on after {num_tokens} tokens: {words}")
            if time.thread_time() - begun > _MASK_SECONDS:
                raise ValueError(f"finding the next tokens takes more than {_MASK_SECONDS} s of processor time")
            allowed = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")[: len(closing)] != 0
            chosen = allowed & closing
            tokens = np.flatnonzero(chosen if chosen.any() and chooser.random() < 0.5 else allowed)
            token = int(chooser.choice(tokens))
            if token in vocabulary.eos_tokens or time.process_time() > until:
                break
            walk.consume_token(token)
