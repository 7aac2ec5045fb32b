"""Readers of answers: outputs of the engine -> reasoning, content and tool calls."""

import itertools
from collections import deque
from collections.abc import Iterator, Sequence

from dcpmla.serving.chat.events import Kind, Piece, PieceCollector, Pieces
from dcpmla.serving.chat.parser import MarkupParser
from dcpmla.serving.messages import Output


class HiddenTokens:
    """Texts of special tokens that answers do not show."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._tokens = sorted(tokens, key=len, reverse=True)  # A token may begin as a longer one does.
        self._beginnings = {token[:length] for token in tokens for length in range(1, len(token))}
        self._first_letters = {token[0] for token in tokens}
        self._longest = max(map(len, tokens), default=0)

    def split(self, text: str) -> tuple[str, str]:
        """Return a text without these tokens, and its last characters if a token may begin there."""
        if not any(letter in text for letter in self._first_letters):
            return text, ""
        for token in self._tokens:
            text = text.replace(token, "")
        lengths = range(min(len(text), self._longest - 1), 0, -1)
        kept = len(text) - next((length for length in lengths if text[-length:] in self._beginnings), 0)
        return text[:kept], text[kept:]


class AnswerReader:
    """The reader of one answer.

    Args:
        parsers: Parsers of the answer's text, which has special tokens. Each parses the texts that the one before it
            leaves; without parsers all text is content.
        hidden: Tokens that content and reasoning do not show.
        counts_reasoning: Whether the reasoning is parsed, so that its tokens are counted.
        in_reasoning: Whether the answer begins inside the reasoning.
        is_parallel: Whether the answer may have several calls; otherwise only the first is kept.

    Attributes:
        has_calls: Whether a call has begun.
        num_reasoning_tokens: Tokens of the reasoning and of the markup around it, None if it is not parsed.
    """

    def __init__(
        self,
        parsers: Sequence[MarkupParser],
        hidden: HiddenTokens,
        *,
        counts_reasoning: bool = False,
        in_reasoning: bool = False,
        is_parallel: bool = True,
    ) -> None:
        self._parsers, self._is_parallel = parsers, is_parallel
        self._counts = counts_reasoning  # until the reasoning has ended
        self._hidden, self._held, self._out = hidden, "", PieceCollector()
        self._kind: Kind | None = None  # of the last piece
        self._in_reasoning, self._length = in_reasoning, 0
        self._starts: deque[int] = deque()  # offsets of tokens whose text has not come
        self.has_calls = False
        self.num_reasoning_tokens = 0 if counts_reasoning else None

    def push(self, output: Output) -> None:
        """Read an output."""
        for text, num_tokens in self._slices(output):
            self._add(self._counted(text, num_tokens))
        if output.finish_reason:
            self._add(self._parsed("", is_over=True))
            self._begin(None)

    def take(self) -> Pieces:
        """Return what the outputs since the last call add to the answer."""
        return self._out.take()

    def finish_reason(self, reason: str | None) -> str | None:
        """Return the reason of an answer's end, from the engine's: calls are one."""
        return "tool_calls" if reason == "stop" and self.has_calls else reason

    def _slices(self, output: Output) -> Iterator[tuple[str, int]]:
        """Yield the text in slices, each with the number of tokens that begin with it.

        Text is cut up to the first content or call, with which the reasoning ends.
        """
        start, end = self._length, self._length + len(output.text)
        self._length, first, num_tokens = end, start, 0
        if self._counts:
            self._starts.extend(output.offsets)
            while self._counts and self._starts and (self._starts[0] < end or output.finish_reason):
                cut = min(self._starts.popleft(), end)
                if cut > start:
                    yield output.text[start - first : cut - first], num_tokens
                    start, num_tokens = cut, 0
                num_tokens += 1
        if end > start or num_tokens:
            yield output.text[start - first :], num_tokens

    def _counted(self, text: str, num_tokens: int) -> Pieces:
        """Parse a slice, and count its tokens if it belongs to the reasoning."""
        pieces = self._parsed(text)
        if pieces.content or pieces.calls:
            self._in_reasoning = self._counts = False
        elif pieces.reasoning:
            self._in_reasoning = True
        if self._in_reasoning and self.num_reasoning_tokens is not None:
            self.num_reasoning_tokens += num_tokens
        return pieces

    def _parsed(self, text: str, is_over: bool = False) -> Pieces:
        """Return the pieces that a text makes certain."""
        pieces = Pieces([Piece("text", text)])
        for parser in self._parsers:
            parts = [parser.push(piece.text) if piece.kind == "text" else (piece,) for piece in pieces]
            pieces = Pieces(itertools.chain(*parts, parser.push("", is_over)))
        return pieces

    def _add(self, pieces: Pieces) -> None:
        """Add pieces to the output's, without hidden tokens and calls that are not kept."""
        for piece in pieces:
            if piece.kind == "call" and piece.number and not self._is_parallel:
                continue
            if piece.kind != self._kind:
                self._begin(piece.kind)
            if piece.kind == "call":
                self.has_calls = True
                self._out.add(piece)
            else:
                text, self._held = self._hidden.split(self._held + piece.text)
                self._out.add(piece._replace(text=text))

    def _begin(self, kind: Kind | None) -> None:
        """Add the text that was held back, which ends before another kind of piece, or the answer's end."""
        if self._kind is not None:
            self._out.add(Piece(self._kind, self._held))
        self._kind, self._held = kind, ""
