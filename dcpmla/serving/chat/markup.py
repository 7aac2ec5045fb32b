"""The markup of a family's answers: one description, which parsers read, grammars allow and encodings write."""

import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

from dcpmla.serving.chat.values import dumps, types_of

SPACES = " \t\r\n"  # between the parts of a call
_NAME = re.compile(r"(?P<name>\S+)")


@dataclass(frozen=True)
class Tags:
    """Markup of arguments that are written one after the other, each as a key and a value.

    Attributes:
        start: Text before a key.
        middle: Text between a key and its value, with `{type}` where the model declares the value's type.
        end: Text after a value.
        key: Pattern of the key and of the markup between it and the value. Its group `key` is the key; a group `type`
            is the value's type as the model declares it.
        types: Word for each type of JSON, in place of `{type}`; empty if types are not written.
        escapes: Whether the key has `&amp;` and `&quot;` in place of `&` and `"`.
    """

    start: str
    middle: str
    end: str
    key: re.Pattern[str]
    types: Mapping[str, str] = field(default_factory=dict)
    escapes: bool = False

    def before_value(self, key: str, kind: str) -> str:
        """Return the text before a value whose type in JSON is `kind`."""
        return self.start + (escaped(key) if self.escapes else key) + self.after_key(kind)

    def after_key(self, kind: str) -> str:
        """Return the text between a key and a value whose type in JSON is `kind`."""
        return self.middle.replace("{type}", self.types.get(kind, ""))


def _random_id(name: str, written: str | None, number: int) -> str:
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True, kw_only=True)
class AnswerFormat:
    """The format of a family's answers. Its texts have the white space that templates write around markup.

    Attributes:
        name: vLLM's name of its parser.
        marks: Texts that all are in a chat template of the format.
        types: Types of models whose template does not show the format, or is absent.
        call: Start and end of a call. An empty end: the call ends with its arguments.
        header: Pattern of the text between a call's start and its arguments, with groups `name` and maybe `id`.
        header_end: Text between the name and the arguments. If it is white space, what follows ends the header.
        stops_too: Other text that ends the header and is part of the arguments; empty for none.
        before_name: Text before the function's name.
        numbering: Text after the function's name, with `{number}`, any number; empty for none.
        tags: Markup of arguments by key and value; None if arguments are a JSON object.
        after_arguments: Text between the arguments and the call's end.
        wraps: Whether a call may be a JSON object with fields `name` and `arguments`.
        section: Start and end of the section of calls, both empty if calls are in no section.
        between: Text between two calls.
        reasoning: Start and end of the reasoning.
        after_reasoning: Text between the reasoning and the content, which is no markup.
        content: Start and end of the content.
        ends: Text after the whole answer, and the token that ends it.
        make_id: Function of the function's name, the id that the model wrote (None if it wrote none) and the number
            of calls before this one that returns the call's id.
    """

    name: str
    marks: tuple[str, ...]
    types: tuple[str, ...] = ()
    call: tuple[str, str]
    header: re.Pattern[str] = _NAME
    header_end: str = ""
    stops_too: str = ""
    before_name: str = ""
    numbering: str = ""
    tags: Tags | None = None
    after_arguments: str = ""
    wraps: bool = False
    section: tuple[str, str] = ("", "")
    between: str = ""
    reasoning: tuple[str, str] = ("<think>", "</think>")
    after_reasoning: str = ""
    content: tuple[str, str] = ("", "")
    ends: tuple[str, str] = ("", "")
    make_id: Callable[[str, str | None, int], str] = _random_id

    @cached_property
    def bare(self) -> Self:
        """Return the format without white space around markup, as parsers look for it."""
        tags = self.tags and replace(self.tags, start=self.tags.start.strip(), end=self.tags.end.strip())
        section, call = ((start.strip(), end.strip()) for start, end in (self.section, self.call))
        return replace(self, section=section, call=call, header_end=self.header_end.strip(), tags=tags)

    @property
    def before_calls(self) -> str:
        """Return the white space between the content and the first call."""
        start = self.section[0] or self.call[0]
        return start[: len(start) - len(start.lstrip())]

    @cached_property
    def stops(self) -> tuple[str, ...]:
        """Return the texts that end a header."""
        ends = (self.header_end,) if self.header_end or self.tags is None else (self.tags.start, self.call[1])
        return (*ends, self.stops_too) if self.stops_too else ends

    @cached_property
    def dropped(self) -> tuple[str, ...]:
        """Return the markup of content, which is removed."""
        return tuple(filter(None, (*self.content, *self.ends)))

    def written_calls(self, calls: Iterable[tuple[str, str | Mapping[str, Any]]]) -> str:
        """Return the text of calls, numbered from 1.

        Args:
            calls: Names of functions, each with the arguments, or their text.
        """
        start, end = self.call[0] + self.before_name, self.after_arguments + self.call[1]
        texts = (
            f"{start}{name}{self.numbering.format(number=number)}{self.header_end}{self._arguments(arguments)}{end}"
            for number, (name, arguments) in enumerate(calls, 1)
        )
        return self.section[0] + self.between.join(texts) + self.section[1]

    def _arguments(self, arguments: str | Mapping[str, Any]) -> str:
        """Return the text of arguments; with tags, texts are written as they are and other values as JSON."""
        if isinstance(arguments, str):
            return arguments
        if self.tags is None:
            return dumps(arguments)
        before, end = self.tags.before_value, self.tags.end
        return "".join(
            f"{before(key, min(types_of(value)))}{value if isinstance(value, str) else dumps(value)}{end}"
            for key, value in arguments.items()
        )


def escaped(text: str) -> str:
    """Return a text as markup has it between quotes."""
    return text.replace("&", "&amp;").replace('"', "&quot;")


def held_length(text: str, markers: tuple[str, ...]) -> int:
    """Return the length of the longest end of a text that may begin one of the markers."""
    longest = min(len(text), max(map(len, markers), default=0) - 1)
    for length in range(longest, 0, -1):
        end = text[-length:]
        if any(len(marker) > length and marker.startswith(end) for marker in markers):
            return length
    return 0


def find_first(text: str, markers: tuple[str, ...]) -> tuple[int, str] | None:
    """Return the position of the first marker in a text, and the marker: the longest one at that position."""
    hits = [(position, -len(marker), marker) for marker in markers if (position := text.find(marker)) >= 0]
    return (min(hits)[0], min(hits)[2]) if hits else None
