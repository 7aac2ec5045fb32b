"""The arguments of a call in an answer: JSON text in pieces, as soon as each is certain."""

import re
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

from dcpmla.serving.chat.markup import SPACES, AnswerFormat, Tags, find_first, held_length
from dcpmla.serving.chat.values import dumps, json_inside, json_of, object_of, schema_types

_WRAPPED = re.compile(r'\s*,\s*"(?:arguments|parameters)"\s*:\s*')
_WRAPPED_FIELDS = (',"arguments":', ',"parameters":')
_LONGEST_KEY = 4096  # characters of a key with its markup; a longer one is no key
_NO_NAME = '{"":0'  # the beginning of an object, in place of its field `name`
_IN_STRING = re.compile(r'[^"\\\x00-\x1f]*')  # characters of a JSON string that need no attention
# Characters between brackets and strings: numbers, and the letters of true, false, null, NaN and Infinity.
_OUTSIDE = re.compile(r"[-+.0-9:, \t\r\ntruefalsnNIiyE]*")
Waiting = Generator[None, None, None]  # Each step ends where more text is needed.


@dataclass
class Rest:
    """The text of an answer that is not parsed yet.

    Attributes:
        is_over: Whether the answer has ended, so that no more text comes.
    """

    text: str = ""
    is_over: bool = False

    def cut(self, length: int) -> str:
        """Remove the beginning of the text, and return it."""
        text, self.text = self.text[:length], self.text[length:]
        return text

    def more(self) -> Generator[None, None, bool]:
        """Wait for more text or the answer's end; return False if the answer had ended before."""
        if self.is_over:
            return False
        yield
        return True


class ArgumentReader:
    """A reader of one call's arguments, in any of three forms. The call's end is removed with them.

    A call ends with its own end, which is part of it, or where something else begins or ends. Beginnings of markup are
    dropped where an answer ends inside a call, so the whole answer's arguments begin with a cut answer's.

    Args:
        rest: Text of the answer from the arguments on.
        bare: Format without white space around markup.
        emit: Function that takes the next JSON text of the arguments.
    """

    def __init__(self, rest: Rest, bare: AnswerFormat, emit: Callable[[str], None]) -> None:
        self._rest, self._emit = rest, emit
        self._end = bare.call[1]  # Empty: the call ends with its arguments.
        self._ends = tuple(filter(None, (self._end, bare.section[1], bare.section[0], bare.call[0])))

    def json(self) -> Waiting:
        """Read a JSON object, whose characters pass as they are. So does a text that is no JSON, up to the call's end.

        No text at all is an empty object.
        """
        rest = self._rest
        while not (text := rest.text.lstrip(SPACES)):
            if not (yield from rest.more()):
                return
        rest.text = text
        if not text.startswith(("{", "[", '"')):
            yield from self._up_to_end(self._emit, "{}")
            return
        is_whole = yield from _json_value(rest, self._emit)
        if not is_whole or self._end:  # Text between the object and the end is dropped.
            yield from self._up_to_end((lambda text: None) if is_whole else self._emit)

    def wrapped(self) -> Waiting:
        """Read a JSON object after its field `name`: the value of its field `arguments` (or `parameters`).

        The value passes in pieces if it is the next field, else as a whole.
        """
        rest = self._rest
        while not (opening := _WRAPPED.match(rest.text)):
            begun = "".join(rest.text.split())
            if not any(field.startswith(begun) for field in _WRAPPED_FIELDS):
                break
            if not (yield from rest.more()):
                return
        if opening is not None:
            rest.cut(opening.end())
        else:
            rest.text, pieces = _NO_NAME + rest.text, list[str]()
            if (yield from _json_value(rest, pieces.append)) is None:
                return
            rest.text = _arguments_of("".join(pieces)) + rest.text
        yield from self.json()

    def tagged(self, tags: Tags, schema: Mapping[str, Any]) -> Waiting:
        """Read arguments that are written by key and value.

        A text passes in pieces as a JSON string. Other values pass as they are if they are JSON, else as a string. A
        value's end counts only if another argument or the call's end follows, so a value may contain it.

        Args:
            schema: JSON schema of the function's parameters.
        """
        rest, markers, before = self._rest, (tags.start, *self._ends), "{"
        while True:
            marked = find_first(rest.text, markers)
            position, marker = marked or (len(rest.text) - held_length(rest.text, markers), "")
            if marker and marker != tags.start:
                rest.cut(position + (len(marker) if marker == self._end else 0))
                self._emit("{}" if before == "{" else "}")
                return
            rest.cut(position)
            match = tags.key.match(rest.text, len(tags.start)) if marker else None
            if match is not None:
                rest.cut(match.end())
                self._emit(before)
                yield from self._value(tags, markers, match, schema)
                before = ", "
            elif marker and len(rest.text) > _LONGEST_KEY:
                rest.cut(len(tags.start))
            elif not (yield from rest.more()):
                return

    def _value(self, tags: Tags, markers: tuple[str, ...], match: re.Match[str], schema: Mapping[str, Any]) -> Waiting:
        """Read a value after its key. Its type is the declared one, or the schema's."""
        rest, key, declared = self._rest, match["key"], match.groupdict().get("type")
        if tags.escapes:
            key = key.replace("&quot;", '"').replace("&amp;", "&")
        types = schema_types(schema, key) if declared is None else frozenset[str]()
        is_text = types == {"string"} if declared is None else declared == tags.types["string"]
        self._emit(dumps(key) + ": " + ('"' if is_text else ""))
        pieces: list[str] = []
        while True:
            position, is_ended = _end_of_value(rest, tags.end, markers)
            pieces.append(rest.cut(position))
            if is_text:
                self._emit(json_inside(pieces[-1]))
            if is_ended:
                rest.cut(len(tags.end))
                self._emit('"' if is_text else json_of("".join(pieces), types))
                return
            if not (yield from rest.more()):
                return

    def _up_to_end(self, emit: Callable[[str], None], nothing: str = "") -> Waiting:
        """Read a text up to the call's end.

        Args:
            nothing: Text to emit in place of an empty one.
        """
        rest = self._rest
        while (end := find_first(rest.text, self._ends)) is None:
            if text := rest.cut(len(rest.text) - held_length(rest.text, self._ends)):
                emit(text)
                nothing = ""
            if not (yield from rest.more()):
                return
        position, marker = end
        emit(rest.cut(position) or nothing)
        rest.cut(len(marker) if marker == self._end else 0)


def _json_value(rest: Rest, emit: Callable[[str], None]) -> Generator[None, None, bool | None]:
    """Read a JSON value that begins with a bracket or a quote. Return True at its end, None if the answer ends before,
    and False at a character that is wrong where it is: the text is no JSON.
    """
    depth, in_string, position = 0, False, 0
    while True:
        if position >= len(rest.text):  # An escaped character may still come.
            position -= len(rest.text)
            emit(rest.cut(len(rest.text)))
            if not (yield from rest.more()):
                return None
            continue
        position = (_IN_STRING if in_string else _OUTSIDE).match(rest.text, position).end()  # type: ignore[union-attr]
        character = rest.text[position : position + 1]
        if not character:
            continue
        if in_string and character == "\\":
            position += 2
            continue
        if in_string:
            in_string, is_right = False, character == '"'  # Others are control characters.
            position += 1
        else:
            in_string = character == '"'
            depth += (character in "{[") - (character in "}]")
            is_right = character in '{}[]"' and depth >= 0
            position += is_right
        if not is_right or (depth == 0 and not in_string):
            emit(rest.cut(position))
            return is_right


def _arguments_of(wrapped: str) -> str:
    """Return the JSON text of the arguments in an object that begins with `_NO_NAME`; text that is no JSON as it is."""
    fields = object_of(wrapped)
    if fields is None:
        return wrapped.removeprefix(_NO_NAME)
    return dumps(fields.get("arguments", fields.get("parameters", {})))


def _end_of_value(rest: Rest, end: str, markers: tuple[str, ...]) -> tuple[int, bool]:
    """Return the position of a value's end or of what may be one, and whether an argument or the call's end follows."""
    position = rest.text.find(end)
    while position >= 0:
        following = rest.text[position + len(end) :].lstrip(SPACES)
        if following.startswith(markers):
            return position, True
        if any(marker.startswith(following) for marker in markers):
            return position, rest.is_over
        position = rest.text.find(end, position + 1)
    return len(rest.text) - held_length(rest.text, (end,)), False
