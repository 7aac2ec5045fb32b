"""Readers of a call's arguments: each turns the answer's text into pieces of JSON text as soon as they are certain."""

import json
import re
from collections.abc import Mapping
from typing import Any, Protocol

from dcpmla.serving.chat.json_scanner import JsonScanner
from dcpmla.serving.chat.markup import SPACES, AnswerFormat, Tags, find_first, held_length
from dcpmla.serving.chat.values import dumps, json_inside, json_of, schema_types

_WRAPPED = re.compile(r'\s*,\s*"(?:arguments|parameters)"\s*:\s*')
_WRAPPED_FIELDS = (',"arguments":', ',"parameters":')
_LONGEST_KEY = 4096  # characters of a key with its markup; a longer one is no key
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

    Args:
        bare: Format without white space around markup.

    Attributes:
        end: The call's own end, which is part of it. Empty: the call ends with its arguments.
        texts: The end, and the texts that may follow without it.
    """

    def __init__(self, bare: AnswerFormat) -> None:
        self.end = bare.call[1]
        self.texts = tuple(filter(None, (self.end, bare.section[1], bare.section[0], bare.call[0])))

    def split(self, text: str) -> tuple[str, str, str | None]:
        """Return a text up to the first end, the part of it that may begin an end, and what follows the call.

        Without an end, nothing follows: None.
        """
        end = find_first(text, self.texts)
        if end is None:
            cut = len(text) - held_length(text, self.texts)
            return text[:cut], text[cut:], None
        position, marker = end
        return text[:position], "", text[position + (len(marker) if marker == self.end else 0) :]


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
        if self._scanner.is_complete and not self._ends.end:
            return json_text, text
        if not (self._scanner.is_complete or self._scanner.is_broken):
            return json_text, None
        before, self._held, following = self._ends.split(text)  # Text between the object and the end is dropped.
        return json_text + (before if self._scanner.is_broken else ""), following

    def finish(self) -> str:
        """Return nothing: only the beginning of an end is held."""
        return ""

    def _without_start(self, text: str) -> tuple[str, str | None]:
        """Read text where the object should begin: the call's end, or text that is no JSON."""
        before, held, following = self._ends.split(text)
        if not before and following is not None:
            return "{}", following
        self._held = held
        if before:
            self._is_empty, self._scanner.is_broken = False, True
        return before, following


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


class ParameterArguments:
    """A reader of arguments that are written by key and value.

    A text passes in pieces as a JSON string. Other values pass as they are if they are JSON, else as a string. A
    value's end counts only if another argument or the call's end follows, so a value may contain it.

    Args:
        schema: JSON schema of the function's parameters.
    """

    def __init__(self, ends: CallEnds, tags: Tags, schema: Mapping[str, Any]) -> None:
        self._ends, self._tags, self._schema = ends, tags, schema
        self._markers = (tags.start, *ends.texts)
        self._held = ""
        self._is_first = True
        self._value: list[str] | None = None  # pieces of the value that is being read
        self._is_text = False
        self._types: frozenset[str] = frozenset()

    def push(self, text: str) -> tuple[str, str | None]:
        """Take the next text."""
        self._held += text
        pieces: list[str] = []
        while self._held:
            before = len(self._held)
            piece, following = self._read_key() if self._value is None else (self._read_value(self._value), None)
            pieces.append(piece)
            if following is not None or len(self._held) == before:
                return "".join(pieces), following
        return "".join(pieces), None

    def finish(self) -> str:
        """Return the end of a value that has ended if nothing else follows."""
        end = self._tags.end
        if self._value is None or not self._held.startswith(end):
            return ""
        self._held = end + self._tags.start
        return self._read_value(self._value)

    def _read_key(self) -> tuple[str, str | None]:
        """Read up to a value, or to the call's end."""
        start = self._tags.start
        marked = find_first(self._held, self._markers)
        if marked is None:
            self._held = self._held[len(self._held) - held_length(self._held, self._markers) :]
            return "", None
        position, marker = marked
        if marker != start:
            following = self._held[position + (len(marker) if marker == self._ends.end else 0) :]
            return ("{}" if self._is_first else "}"), following
        match = self._tags.key.match(self._held, position + len(start))
        if match is None:
            is_key = len(self._held) - position <= _LONGEST_KEY
            self._held = self._held[position + (0 if is_key else len(start)) :]
            return "", None
        self._held = self._held[match.end() :]
        self._value = []
        return self._open(match["key"], match.groupdict().get("type")), None

    def _open(self, key: str, declared: str | None) -> str:
        """Return the JSON text before a value, and note its type: the declared one, or the schema's."""
        if self._tags.escapes:
            key = key.replace("&quot;", '"').replace("&amp;", "&")
        self._types = schema_types(self._schema, key) if declared is None else frozenset()
        self._is_text = self._types == {"string"} if declared is None else declared == self._tags.types["string"]
        opening = ("{" if self._is_first else ", ") + dumps(key) + ": " + ('"' if self._is_text else "")
        self._is_first = False
        return opening

    def _read_value(self, value: list[str]) -> str:
        """Read more of a value and return its JSON text, which is certain in pieces if the value is a text."""
        end = self._tags.end
        position, is_ended = self._held.find(end), None
        while position >= 0:
            is_ended = self._is_followed(position + len(end))
            if is_ended is not False:
                break
            position = self._held.find(end, position + 1)
        cut = position if position >= 0 else len(self._held) - held_length(self._held, (end,))
        value.append(self._held[:cut])
        self._held = self._held[cut + (len(end) if is_ended else 0) :]
        if not is_ended:
            return json_inside(value[-1]) if self._is_text else ""
        self._value = None
        return f'{json_inside(value[-1])}"' if self._is_text else json_of("".join(value), self._types)

    def _is_followed(self, position: int) -> bool | None:
        """Return whether an argument or the call's end follows at a position, None if that needs more text."""
        following = self._held[position:].lstrip(SPACES)
        if following.startswith(self._markers):
            return True
        return None if any(marker.startswith(following) for marker in self._markers) else False
