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

    index: int  # type: ignore[assignment]  # it hides a method of tuples
    call_id: str | None
    name: str | None
    arguments: str


class Pieces(NamedTuple):
    """The pieces that a text adds to an answer."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallPiece, ...] = ()


class AnswerParser(Protocol):
    """A parser of one answer. Its pieces are final: later text never takes them back."""

    def push(self, text: str) -> Pieces:
        """Take the next text of the answer, special tokens included, and return the pieces that it makes certain."""
        ...

    def finish(self) -> Pieces:
        """End the answer and return the text that waited: incomplete markup is content, or reasoning."""
        ...


class PieceCollector:
    """Pieces that are collected until they are taken."""

    def __init__(self) -> None:
        self.reasoning = self.content = ""
        self.calls: list[CallPiece] = []
        self._index = -1

    def extend_call(self, json_text: str) -> None:
        """Add JSON text to the arguments of the last call."""
        if self.calls and json_text:
            last = self.calls[-1]
            self.calls[-1] = last._replace(arguments=last.arguments + json_text)
        elif json_text:
            self.calls.append(CallPiece(self._index, None, None, json_text))

    def take(self) -> Pieces:
        """Return the pieces, and forget them."""
        pieces = Pieces(self.reasoning, self.content, tuple(self.calls))
        self._index = self.calls[-1].index if self.calls else self._index
        self.reasoning = self.content = ""
        self.calls = []
        return pieces
