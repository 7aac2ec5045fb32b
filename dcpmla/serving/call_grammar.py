"""Grammars of answers in a family's markup: literals, special tokens, texts and JSON schemas in sequence."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dcpmla.runtime.grammar import Grammar
from dcpmla.runtime.grammars import check_extra

_ANY = "(?s:.*)"


class Schema(NamedTuple):
    """A JSON value of a schema."""

    value: Mapping[str, Any]


class Pattern(NamedTuple):
    """Text that a regular expression matches."""

    regex: str


class Text(NamedTuple):
    """Text without special tokens, up to and including its first `end`; an empty end is none.

    Attributes:
        matches: Regular expressions that all match the whole text before the end.
        excludes: Regular expressions that must not match it.
    """

    end: str = ""
    matches: Sequence[str] = ()
    excludes: Sequence[str] = ()


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


Part = str | Schema | Pattern | Text | Either | Repeat
Parts = Sequence[Part]


def parts_grammar(parts: Parts, special_tokens: Mapping[str, int]) -> Grammar:
    """Return the grammar of a sequence of parts.

    Args:
        special_tokens: Ids of the vocabulary's special tokens, by text: these are tokens of their own in the markup.
    Raises:
        ValueError: The extra structured is not installed, or a schema has a keyword that cannot be enforced.
    """
    check_extra()
    writer = _Writer(special_tokens)
    start = writer.sequence(parts)
    return Grammar("grammar", "\n".join([f"start: {start}", *writer.rules]))


def as_regex(text: str) -> str:
    """Return the regular expression of a text, in one line."""
    return "".join(r"\n" if each == "\n" else each if each in "<> " else re.escape(each) for each in text)


class _Writer:
    """The rules of a grammar in llguidance's dialect of Lark."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._names: dict[str, str] = {}  # the rule of each expression
        self._ids = special_tokens
        longest_first = sorted(special_tokens, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if special_tokens else None

    @property
    def rules(self) -> list[str]:
        """Return the rules besides the first."""
        return [f"{name}: {expression}" for expression, name in self._names.items()]

    def sequence(self, parts: Parts) -> str:
        """Return the expression of parts one after the other."""
        return " ".join(filter(None, map(self._part, parts))) or '""'

    def _part(self, part: Part) -> str:
        from dcpmla.runtime.grammar_text import schema_in_grammar

        match part:
            case str():
                return " ".join(map(self._literal, self._pieces(part)))
            case Schema():
                return f"%json {schema_in_grammar(dict(part.value))}"
            case Pattern():
                return f"/{_in_slashes(part.regex)}/"
            case Text():
                return self._text(part)
            case Either():
                return f"({' | '.join(map(self.sequence, part.options))})"
            case Repeat():
                one = self._rule("r", self.sequence(part.parts))
                if part.limit == 1:
                    return one
                times = "*" if part.limit is None else f"{{0,{part.limit - 1}}}"
                return f"{one} ({self.sequence(part.between)} {one}){times}"

    def _pieces(self, text: str) -> list[str]:
        """Return a text's special tokens, and the texts around them."""
        return [piece for piece in ([text] if self._split is None else self._split.split(text)) if piece]

    def _literal(self, piece: str) -> str:
        return f"<[{self._ids[piece]}]>" if piece in self._ids else json.dumps(piece, ensure_ascii=False)

    def _text(self, part: Text) -> str:
        """Return the expression of a text and its end.

        The text and the end up to its first special token are one lexeme: the longest one counts, and nothing but the
        special token ends it. So the text may have the beginning of its end.
        """
        pieces = self._pieces(part.end)
        number = next((number for number, piece in enumerate(pieces) if piece in self._ids), len(pieces))
        begun = as_regex("".join(pieces[:number]))
        terms = [f"/{_in_slashes(f'(?:{regex}){begun}')}/" for regex in part.matches or [_ANY]]
        terms += [f"~/{_in_slashes(f'(?:{regex}){begun}')}/" for regex in part.excludes]
        if part.end:
            after = _ANY if number < len(pieces) else "(?s:.+)"
            terms.append(f"~/{_in_slashes(_ANY + as_regex(part.end) + after)}/")
        return " ".join([self._rule("T", " & ".join(terms)), *map(self._literal, pieces[number:])])

    def _rule(self, prefix: str, expression: str) -> str:
        """Return the name of a rule; equal ones have one."""
        return self._names.setdefault(expression, f"{prefix}{len(self._names)}")


def _in_slashes(regex: str) -> str:
    """Return a regular expression with its unescaped slashes escaped."""
    return re.sub(r"\\.|/", lambda match: r"\/" if match[0] == "/" else match[0], regex, flags=re.DOTALL)
