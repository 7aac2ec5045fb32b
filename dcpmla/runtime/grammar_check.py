"""The check of a client's grammar before any rank compiles it: whether texts satisfy it, at bounded cost.

It runs in a process of its own (`serving/worker.py`): a hostile grammar may take all of its time and memory, and
llguidance's log is its standard error.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from typing import Any

import llguidance
import numpy as np

from dcpmla.runtime.grammar_text import SchemaFault, compile_grammar
from dcpmla.runtime.schemas import Path, alone, inner_schemas, is_local, pointer, refer

_MASK_SECONDS = 0.1  # processor time of one mask: 25 times what the limits in `grammar_text` are to allow
_NUM_WALKS, _NUM_STEPS, _WALK_SECONDS = 6, 48, 0.2  # walks, their tokens, and the processor time of all
_SEARCH_SECONDS = 0.4  # processor time for finding the part that is at fault
_CLOSING = '"}]>'  # These letters end texts and lists, so that a walk comes to what follows.
_NOTHING = "NoExtensionBias"  # llguidance's word for a mask without tokens
_MAX_WORDS = 500  # characters of a reason
_LOG_LEVEL = 3  # The log then has all rules.
_STANDARD_ERROR = 2


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
