"""The markup of a family's answers: texts around reasoning, tool calls and their arguments."""

import re
from dataclasses import dataclass

SPACES = " \t\r\n"  # between the parts of a call


@dataclass(frozen=True)
class Parameters:
    """Markup of arguments that are written one after the other, each as a key and a value.

    Attributes:
        start: Text before a key.
        key: Pattern of the key and of the markup between it and the value. Its group `key` is the key; a group `type`
            is the value's type as the model declares it.
        end: Text after a value.
        string_type: The declared type of texts.
        escapes: Whether the key has `&amp;` and `&quot;` in place of `&` and `"`.
    """

    start: str
    key: re.Pattern[str]
    end: str
    string_type: str = ""
    escapes: bool = False


@dataclass(frozen=True)
class Markup:
    """Texts that structure an answer.

    Attributes:
        reasoning: Start and end of the reasoning.
        section: Start and end of the section of calls, both empty if calls are in no section.
        call: Start and end of a call. An empty end: the call ends with its arguments.
        header: Pattern of the text between a call's start and its arguments, with groups `name` and maybe `id`.
        stops: Texts that end the header.
        consumed: Stop that is no part of the arguments, empty if there is none.
        parameters: Markup of arguments by key and value; None if arguments are a JSON object.
        wraps: Whether a call may be a JSON object with fields `name` and `arguments`.
        before_calls: Text between the content and the first call.
        after_reasoning: Text between the reasoning and the content.
        dropped: Other markup of content, which is removed.
    """

    reasoning: tuple[str, str]
    call: tuple[str, str]
    header: re.Pattern[str]
    stops: tuple[str, ...]
    section: tuple[str, str] = ("", "")
    consumed: str = ""
    parameters: Parameters | None = None
    wraps: bool = False
    before_calls: str = ""
    after_reasoning: str = ""
    dropped: tuple[str, ...] = ()


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
