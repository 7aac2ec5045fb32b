"""The end of a JSON value in a stream of text."""

import re

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')  # characters of a JSON string that need no attention
_OUTSIDE = re.compile(r"[-+.0-9A-Za-z:, \t\r\n]*")  # characters between brackets and strings
_LETTERS = frozenset("truefalsnNaIityE")  # letters of true, false, null, NaN, Infinity and exponents


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
