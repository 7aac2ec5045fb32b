"""Grammars of answers in a family's markup: literals, special tokens and JSON schemas in sequence.

They hold the model to tool calls: `tool_choice` required, or a named function. Text of a schema is checked before, by
itself, for a message with its path (`GrammarChecks`).
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dcpmla.runtime.grammar import Grammar
from dcpmla.runtime.grammars import check_extra


class Schema(NamedTuple):
    """A JSON value of a schema."""

    value: Mapping[str, Any]


class Pattern(NamedTuple):
    """Text that a regular expression matches."""

    regex: str


class Until(NamedTuple):
    """Any text up to and including its first `end`."""

    end: str


class Either(NamedTuple):
    """One of several sequences."""

    options: Sequence["Parts"]


class Repeat(NamedTuple):
    """A sequence that is repeated, at least once, with another sequence between two repetitions.

    Attributes:
        limit: Limit of repetitions; None is none.
    """

    parts: "Parts"
    between: "Parts" = ()
    limit: int | None = None


Part = str | Schema | Pattern | Until | Either | Repeat
Parts = Sequence[Part]


def call_grammar(
    calls: Sequence[Parts],
    special_tokens: Mapping[str, int],
    *,
    before: str = "",
    between: str = "",
    after: str = "",
    limit: int | None = None,
) -> Grammar:
    """Return the grammar of answers that consist of tool calls, at least one.

    Args:
        calls: Each function's call in the markup of the model, for example
            ["<call>name\\n", Schema(parameters), "</call>"].
        special_tokens: Ids of the vocabulary's added tokens, by text: these are tokens of their own in the markup.
        before, between, after: Markup around all calls, and between two.
        limit: Limit of the number of calls; None is none.
    Raises:
        ValueError: The extra structured is not installed, or there is no call.
    """
    if not calls:
        raise ValueError("calls is empty; it must have a call of one function or more")
    return parts_grammar([before, Repeat([Either(calls)], [between], limit), after], special_tokens)


def parts_grammar(parts: Parts, special_tokens: Mapping[str, int]) -> Grammar:
    """Return the grammar of a sequence of parts.

    Args:
        special_tokens: Ids of the vocabulary's added tokens, by text.
    Raises:
        ValueError: The extra structured is not installed.
    """
    check_extra()
    writer = _Writer(special_tokens)
    start = writer.sequence(parts)
    return Grammar("grammar", "\n".join([f"start: {start}", *writer.rules]))


class _Writer:
    """The rules of a grammar in llguidance's dialect of Lark."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self.rules: list[str] = []
        self._ids = special_tokens
        longest_first = sorted(special_tokens, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if special_tokens else None

    def sequence(self, parts: Parts) -> str:
        """Return the expression of parts one after the other."""
        return " ".join(filter(None, map(self._part, parts))) or '""'

    def _part(self, part: Part) -> str:
        from dcpmla.runtime.grammar_text import schema_in_grammar

        match part:
            case str():
                return " ".join(self._literal(part))
            case Schema():
                return f"%json {schema_in_grammar(dict(part.value))}"
            case Pattern():
                return f"/{_in_slashes(part.regex)}/"
            case Until():
                return self._until(part.end)
            case Either():
                return f"({' | '.join(map(self.sequence, part.options))})"
            case Repeat():
                one = self._rule(self.sequence(part.parts))
                if part.limit == 1:
                    return one
                times = "*" if part.limit is None else f"{{0,{part.limit - 1}}}"
                return f"{one} ({self.sequence(part.between)} {one}){times}"

    def _literal(self, text: str) -> list[str]:
        """Return the expressions of a text: its special tokens, and the texts around them."""
        pieces = [text] if self._split is None else self._split.split(text)
        return [
            f"<[{self._ids[piece]}]>" if piece in self._ids else json.dumps(piece, ensure_ascii=False)
            for piece in pieces
            if piece
        ]

    def _until(self, end: str) -> str:
        """Return the expression of any text up to the first `end`. No text has a special token."""
        first, *following = self._literal(end)
        attribute = "" if first.startswith("<[") else f"[suffix={first}]"
        text = self._rule(r"/(.|\n)*/", attribute)
        return " ".join([text, *([first] if not attribute else []), *following])

    def _rule(self, expression: str, attribute: str = "") -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{attribute}: {expression}")
        return name


def _in_slashes(regex: str) -> str:
    """Return a regular expression with its unescaped slashes escaped."""
    return re.sub(r"\\.|/", lambda match: r"\/" if match[0] == "/" else match[0], regex, flags=re.DOTALL)
