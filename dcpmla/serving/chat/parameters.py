"""The reader of arguments that a model writes one after the other, as keys and values."""

from collections.abc import Mapping
from typing import Any

from dcpmla.serving.chat.arguments import CallEnds
from dcpmla.serving.chat.markup import SPACES, Parameters, find_first, held_length
from dcpmla.serving.chat.values import dumps, json_inside, json_of, schema_types

_LONGEST_KEY = 4096  # characters of a key with its markup; a longer one is no key


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
            piece, following = self._read_key() if self._value is None else (self._read_value(self._value), None)
            pieces.append(piece)
            if following is not None or len(self._held) == before:
                return "".join(pieces), following
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
        marked = find_first(self._held, self._markers)
        if marked is None:
            self._held = self._held[len(self._held) - held_length(self._held, self._markers) :]
            return "", None
        position, marker = marked
        if marker != start:
            following = self._held[position + (len(marker) if marker == self._ends.end else 0) :]
            return ("{}" if self._is_first else "}"), following
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
        following = self._held[position:].lstrip(SPACES)
        if following.startswith(self._markers):
            return True
        return None if any(marker.startswith(following) for marker in self._markers) else False
