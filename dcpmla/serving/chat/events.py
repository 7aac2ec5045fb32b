"""Pieces of an answer, as parsers stream them."""

from typing import NamedTuple, Protocol


class CallPiece(NamedTuple):
    """A piece of a tool call.

    Attributes:
        index: Number of the call in the answer, from 0.
        call_id: Id of the call in its first piece, else None.
        name: The function's whole name in the call's first piece, else None.
        arguments: The next characters of the call's arguments, as JSON text.
    """

    index: int  # type: ignore[assignment]  # hides a method of tuples that nobody needs here
    call_id: str | None
    name: str | None
    arguments: str


class Pieces(NamedTuple):
    """What a text adds to an answer."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallPiece, ...] = ()


class AnswerParser(Protocol):
    """A parser of one answer. Its pieces are final: later text never takes them back."""

    def push(self, text: str) -> Pieces:
        """Take the next text of the answer, special tokens included, and return what is certain now."""
        ...

    def finish(self) -> Pieces:
        """End the answer and return what was held back. Incomplete markup is content (or reasoning)."""
        ...
