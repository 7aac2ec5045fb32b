"""Readers of a call's arguments: each turns the answer's text into pieces of JSON text as soon as they are certain."""

import json
import re
from collections.abc import Mapping
from typing import Any, Protocol

from dcpmla.serving.chat.markup import Markup, Parameters, find_first, held_length
from dcpmla.serving.chat.values import dumps, json_inside, json_of, schema_types

_SPACES = " \t\r\n"
_LONGEST_KEY = 4096  # characters of a key with its markup; a longer one is no key
_WRAPPED = re.compile(r'\s*,\s*"(?:arguments|parameters)"\s*:\s*')
_WRAPPED_FIELDS = (',"arguments":', ',"parameters":')
_NO_NAME = '{"":0'  # the beginning of an object, in place of its field `name`
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')  # characters of a JSON string that need no attention
_OUTSIDE = re.compile(r"[-+.0-9A-Za-z:, \t\r\n]*")  # characters between brackets and strings
_LETTERS = frozenset("truefalsnNaIityE")  # those of true, false, null, NaN, Infinity and exponents


class ArgumentReader(Protocol):
    """A reader of one call's arguments."""

    def push(self, text: str) -> tuple[str, str | None]:
        """Take the next text and return the next JSON text, and the text after the call once it has ended."""
        ...

    def finish(self) -> str:
        """Return the JSON text that becomes certain when the answer ends inside the call. Beginnings of markup are
        dropped, so the arguments of a cut answer begin those of the whole one.
        """
        ...


class JsonScanner:
    """A scanner that finds the end of a JSON value in a stream.

    Attributes:
        is_broken: Whether the text is no JSON: a character is wrong where it is.
        is_complete: Whether the value has ended.
    """

    def __init__(self) -> None:
        self.is_broken = self.is_complete = False
        self._depth = 0
        self._in_string = self._escaped = False

    def scan(self, text: str) -> int:
        """Scan a text and return the number of characters of the value in it."""
        position = 0
        while position < len(text) and not (self.is_broken or self.is_complete):
            position = self._in_text(text, position) if self._in_string else self._between(text, position)
        return position

    def _in_text(self, text: str, position: int) -> int:
        if self._escaped:
            self._escaped = False
            return position + 1
        position = _PLAIN.match(text, position).end()  # type: ignore[union-attr]  # it matches the empty text
        if position == len(text):
            return position
        character = text[position]
        if character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string, self.is_complete = False, self._depth == 0
        else:
            self.is_broken = True  # a control character
        return position + 1

    def _between(self, text: str, position: int) -> int:
        end = _OUTSIDE.match(text, position).end()  # type: ignore[union-attr]
        letters = {character for character in text[position:end] if character.isalpha()}
        if letters - _LETTERS or (self._depth == 0 and end > position):
            self.is_broken = True
            return position
        if end == len(text):
            return end
        character = text[end]
        if character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]" and self._depth:
            self._depth -= 1
            self.is_complete = self._depth == 0
        else:
            self.is_broken = True
            return end
        return end + 1


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
        found = find_first(text, self.texts)
        if found is None:
            return None
        position, marker = found
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
            text = text.lstrip(_SPACES)
            if not text.startswith(("{", "[", '"')):
                return self._without_object(text)
            self._is_empty = False
        length = self._scanner.scan(text)
        json_text, text = text[:length], text[length:]
        if self._scanner.is_complete:
            return json_text, self._after_object(text)
        if self._scanner.is_broken:
            broken, rest = self._broken(text)
            return json_text + broken, rest
        return json_text, None

    def finish(self) -> str:
        """Return nothing: only the beginning of an end is held."""
        return ""

    def _without_object(self, text: str) -> tuple[str, str | None]:
        """Read text where the object should begin: the call's end, or text that is no JSON."""
        found = self._ends.find(text)
        if found is not None and found[0] == 0:
            return "{}", text[found[1] :]
        if held_length(text, self._ends.texts) == len(text):
            self._held = text
            return "", None
        self._is_empty, self._scanner.is_broken = False, True
        return self._broken(text)

    def _after_object(self, text: str) -> str | None:
        """Return the text after the call's end; text between the object and the end is dropped."""
        if not self._ends.end:
            return text
        found = self._ends.find(text)
        if found is None:
            self._held = text[len(text) - held_length(text, self._ends.texts) :]
            return None
        return text[found[1] :]

    def _broken(self, text: str) -> tuple[str, str | None]:
        found = self._ends.find(text)
        if found is not None:
            return text[: found[0]], text[found[1] :]
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
        self._scanner: JsonScanner | None = None  # of the whole object, if other fields come first
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
        """Return nothing: of other fields nothing is certain."""
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

    def __init__(self, ends: CallEnds, parameters: Parameters, schema: Mapping[str, Any]) -> None:
        self._ends, self._parameters, self._schema = ends, parameters, schema
        self._markers = (parameters.start, *ends.texts)
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
            piece, rest = self._read_key() if self._value is None else (self._read_value(self._value), None)
            pieces.append(piece)
            if rest is not None or len(self._held) == before:
                return "".join(pieces), rest
        return "".join(pieces), None

    def finish(self) -> str:
        """Return the end of a value that has ended if nothing else follows."""
        end = self._parameters.end
        if self._value is None or not self._held.startswith(end):
            return ""
        self._held = end + self._parameters.start
        return self._read_value(self._value)

    def _read_key(self) -> tuple[str, str | None]:
        """Read up to a value, or to the call's end."""
        start = self._parameters.start
        found = find_first(self._held, self._markers)
        if found is None:
            self._held = self._held[len(self._held) - held_length(self._held, self._markers) :]
            return "", None
        position, marker = found
        if marker != start:
            rest = self._held[position + (len(marker) if marker == self._ends.end else 0) :]
            return ("{}" if self._is_first else "}"), rest
        match = self._parameters.key.match(self._held, position + len(start))
        if match is None:
            is_key = len(self._held) - position <= _LONGEST_KEY
            self._held = self._held[position + (0 if is_key else len(start)) :]
            return "", None
        self._held = self._held[match.end() :]
        self._value = []
        return self._open(match["key"], match.groupdict().get("type")), None

    def _open(self, key: str, declared: str | None) -> str:
        """Return the JSON text before a value, and note its type: the declared one, or the schema's."""
        if self._parameters.escapes:
            key = key.replace("&quot;", '"').replace("&amp;", "&")
        self._types = schema_types(self._schema, key) if declared is None else frozenset()
        self._is_text = self._types == {"string"} if declared is None else declared == self._parameters.string_type
        opening = ("{" if self._is_first else ", ") + dumps(key) + ": " + ('"' if self._is_text else "")
        self._is_first = False
        return opening

    def _read_value(self, value: list[str]) -> str:
        """Read more of a value and return its JSON text, which is certain in pieces if the value is a text."""
        end = self._parameters.end
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
        rest = self._held[position:].lstrip(_SPACES)
        if rest.startswith(self._markers):
            return True
        return None if any(marker.startswith(rest) for marker in self._markers) else False
