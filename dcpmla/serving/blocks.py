"""Blocks of an answer: its reasoning, texts and tool calls in the order in which they come, and its usage."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from dcpmla.serving.chat.events import Kind, Pieces
from dcpmla.serving.errors import ApiError
from dcpmla.serving.messages import Output
from dcpmla.serving.prompts import Prompt
from dcpmla.serving.reader import AnswerReader
from dcpmla.serving.shown import Json, Usage


class Block:
    """A part of an answer.

    Attributes:
        index: Number of the block in the answer.
        call_id, name: Id and function of a call, else empty.
    """

    def __init__(self, kind: Kind, index: int, call_id: str, name: str) -> None:
        self.kind, self.index, self.call_id, self.name = kind, index, call_id, name
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """Return the text so far; of a call, the arguments."""
        return "".join(self._texts)

    def add(self, text: str) -> None:
        """Add the next text."""
        self._texts.append(text)


class Change(NamedTuple):
    """A change of a block: it begins, gets a text, or ends."""

    action: Literal["open", "add", "close"]
    block: Block
    text: str = ""


class Blocks:
    """The blocks of an answer. At most one is open: the last."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None
        self._call = 0  # number of the open call, 0 for other blocks

    def push(self, pieces: Pieces) -> Iterator[Change]:
        """Yield the changes that pieces make."""
        for piece in pieces:
            if self._open is None or (self._open.kind, self._call) != (piece.kind, piece.number):
                yield from self._begin(Block(piece.kind, len(self.all), piece.call_id or "", piece.name or ""))
                self._call = piece.number
            yield from self._add(piece.text)

    def finish(self) -> Iterator[Change]:
        """End the open block."""
        if self._open is not None:
            yield Change("close", self._open)
            self._open = None

    def _begin(self, block: Block) -> Iterator[Change]:
        yield from self.finish()
        self.all.append(block)
        self._open = block
        yield Change("open", block)

    def _add(self, text: str) -> Iterator[Change]:
        if text and self._open is not None:
            self._open.add(text)
            yield Change("add", self._open, text)


class BlockReply:
    """One answer as blocks, the base of the routes that show it so.

    Attributes:
        finish_reason: Reason of the end, None before.
        stop_string: Stop string that ended the answer, empty for any other end.
    """

    ending = ""
    num_choices = 1

    def __init__(self, prompts: list[Prompt], reader: AnswerReader) -> None:
        self.prompts, self._reader = prompts, reader
        self.usage = Usage(sum(len(prompt.token_ids) for prompt in prompts))
        self.blocks = Blocks()
        self.finish_reason: str | None = None
        self.stop_string = ""

    def drop_prompts(self) -> None:
        """Forget the prompts."""
        self.prompts.clear()

    def add(self, index: int, output: Output) -> None:
        """Take outputs of the whole answer, joined."""
        for _ in self._changes(output):
            pass

    def error(self, error: ApiError) -> Json:
        """Return the last event of a stream that fails."""
        raise NotImplementedError

    def _changes(self, output: Output) -> Iterator[Change]:
        """Count an output, and yield the changes that it makes."""
        if not self.usage.completion_tokens:
            self.usage.cached_tokens = output.num_cached_tokens
        self.usage.completion_tokens += output.num_tokens
        yield from self.blocks.push(self._reader.push(output))
        self.usage.reasoning_tokens = self._reader.num_reasoning_tokens
        if output.finish_reason:
            self.finish_reason = self._reader.finish_reason(output.finish_reason)
            self.stop_string = output.stop_string
            yield from self.blocks.finish()
