"""Readers of a call's arguments: each turns the answer's text into pieces of JSON text as soon as they are certain."""

import json
import re
from typing import Protocol

from dcpmla.serving.chat.json_scanner import JsonScanner
from dcpmla.serving.chat.markup import SPACES, Markup, find_first, held_length
from dcpmla.serving.chat.values import dumps

_WRAPPED = re.compile(r'\s*,\s*"(?:arguments|parameters)"\s*:\s*')
_WRAPPED_FIELDS = (',"arguments":', ',"parameters":')
_NO_NAME = '{"":0'  # the beginning of an object, in place of its field `name`


class ArgumentReader(Protocol):
    """A reader of one call's arguments."""

    def push(self, text: str) -> tuple[str, str | None]:
        """Take the next text and return the next JSON text, and the text after the call once it has ended."""
        ...

    def finish(self) -> str:
        """Return the JSON text that becomes certain when the answer ends inside the call. Beginnings of markup are
        dropped, so the whole answer's arguments begin with a cut answer's.
        """
        ...


class CallEnds:
    """The texts that end a call: its own end, and what begins or ends something else.

    Attributes:
        end: The call's own end, which is part of it. Empty: the call ends with its arguments.
        others: Texts that follow the call.
    """

    def __init__(self, markup: Markup) -> None:
        self.end = markup.call[1]
        self.others = tuple(text for text in (markup.section[1], markup.section[0], markup.call[0]) if text)
        self.texts = tuple(text for text in (self.end, *self.others) if text)

    def find(self, text: str) -> tuple[int, int] | None:
        """Return the position of the first end in a text, and the position of what follows the call."""
        end = find_first(text, self.texts)
        if end is None:
            return None
        position, marker = end
        return position, position + (len(marker) if marker == self.end else 0)


class JsonArguments:
    """A reader of arguments that are a JSON object: its characters pass as they are.

    A text that is no JSON passes as well, up to the first end of a call.
    """

    def __init__(self, ends: CallEnds) -> None:
        self._ends = ends
        self._scanner = JsonScanner()
        self._held = ""
        self._is_empty = True

    def push(self, text: str) -> tuple[str, str | None]:
        """Take the next text."""
        text, self._held = self._held + text, ""
        if self._is_empty:
            text = text.lstrip(SPACES)
            if not text.startswith(("{", "[", '"')):
                return self._without_start(text)
            self._is_empty = False
        length = self._scanner.scan(text)
        json_text, text = text[:length], text[length:]
        if self._scanner.is_complete:
            return json_text, self._after_value(text)
        if self._scanner.is_broken:
            broken, following = self._broken(text)
            return json_text + broken, following
        return json_text, None

    def finish(self) -> str:
        """Return nothing: only the beginning of an end is held."""
        return ""

    def _without_start(self, text: str) -> tuple[str, str | None]:
        """Read text where the object should begin: the call's end, or text that is no JSON."""
        end = self._ends.find(text)
        if end is not None and end[0] == 0:
            return "{}", text[end[1] :]
        if held_length(text, self._ends.texts) == len(text):
            self._held = text
            return "", None
        self._is_empty, self._scanner.is_broken = False, True
        return self._broken(text)

    def _after_value(self, text: str) -> str | None:
        """Return the text after the call's end; text between the object and the end is dropped."""
        if not self._ends.end:
            return text
        end = self._ends.find(text)
        if end is None:
            self._held = text[len(text) - held_length(text, self._ends.texts) :]
            return None
        return text[end[1] :]

    def _broken(self, text: str) -> tuple[str, str | None]:
        end = self._ends.find(text)
        if end is not None:
            return text[: end[0]], text[end[1] :]
        cut = len(text) - held_length(text, self._ends.texts)
        self._held = text[cut:]
        return text[:cut], None


class WrappedArguments:
    """A reader of a JSON object after its field `name`: the value of its field `arguments` (or `parameters`).

    The value passes in pieces if it is the next field, else as a whole.
    """

    def __init__(self, ends: CallEnds) -> None:
        self._inner = JsonArguments(ends)
        self._is_inside = False
        self._scanner: JsonScanner | None = None  # it scans the whole object if other fields come first
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Take the next text."""
        if self._is_inside:
            return self._inner.push(text)
        if self._scanner is None:
            self._held += text
            opening = _WRAPPED.match(self._held)
            if opening is not None:
                self._is_inside = True
                return self._inner.push(self._held[opening.end() :])
            begun = "".join(self._held.split())
            if any(field.startswith(begun) for field in _WRAPPED_FIELDS):
                return "", None
            self._scanner = JsonScanner()
            text, self._held = _NO_NAME + self._held, ""
        length = self._scanner.scan(text)
        self._held += text[:length]
        if not (self._scanner.is_complete or self._scanner.is_broken):
            return "", None
        self._is_inside = True
        return self._inner.push(self._arguments() + text[length:])

    def finish(self) -> str:
        """Return nothing: other fields are not certain."""
        return ""

    def _arguments(self) -> str:
        try:
            fields = json.loads(self._held)
        except (ValueError, RecursionError):
            return self._held.removeprefix(_NO_NAME)
        return dumps(fields.get("arguments", fields.get("parameters", {})))
