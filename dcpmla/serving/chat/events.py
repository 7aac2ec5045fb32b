"""Pieces of an answer, as parsers stream them."""

from typing import Literal, NamedTuple

Kind = Literal["reasoning", "text", "call"]


class Piece(NamedTuple):
    """A piece of an answer's reasoning, of a text or of a tool call.

    Attributes:
        text: The next characters; of a call, the next ones of its arguments, as JSON text.
        number: Number of the call in the answer, from 0. It is 0 in other pieces.
        call_id: Id of the call in its first piece, else None.
        name: The function's whole name in the call's first piece, else None.
    """

    kind: Kind
    text: str
    number: int = 0
    call_id: str | None = None
    name: str | None = None


class Pieces(tuple[Piece, ...]):
    """The pieces that a text adds to an answer, in the order in which the model wrote them."""

    __slots__ = ()

    @property
    def reasoning(self) -> str:
        """Return the reasoning."""
        return "".join(piece.text for piece in self if piece.kind == "reasoning")

    @property
    def content(self) -> str:
        """Return the texts as one."""
        return "".join(piece.text for piece in self if piece.kind == "text")

    @property
    def calls(self) -> tuple[Piece, ...]:
        """Return the pieces of calls."""
        return tuple(piece for piece in self if piece.kind == "call")


class PieceCollector:
    """Pieces that are collected until they are taken. Neighbours of one text or call become one piece."""

    def __init__(self) -> None:
        self._pieces: list[tuple[Piece, list[str]]] = []  # the first piece, and the texts of it and its neighbours

    def add(self, piece: Piece) -> None:
        """Add the next piece."""
        last = self._pieces[-1] if self._pieces else None
        if last is not None and (last[0].kind, last[0].number) == (piece.kind, piece.number):
            last[1].append(piece.text)
        elif piece.text or piece.name:
            self._pieces.append((piece, [piece.text]))

    def take(self) -> Pieces:
        """Return the pieces, and forget them."""
        pieces = Pieces(piece._replace(text="".join(texts)) for piece, texts in self._pieces)
        self._pieces = []
        return pieces
