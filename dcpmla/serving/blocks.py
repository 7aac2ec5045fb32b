"""Blocks of an answer: its reasoning, texts and tool calls in the order in which they come, and its usage."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from dcpmla.serving.chat.events import Kind
from dcpmla.serving.messages import Output
from dcpmla.serving.replies import Reply
from dcpmla.serving.shown import Json

Change = Literal["open", "add", "close"]  # A block begins, gets a text, or ends.


@dataclass
class Block:
    """A part of an answer.

    Attributes:
        index: Number of the block in the answer.
        number: Number of a call among the calls, else 0.
        call_id, name: Id and function of a call, else empty.
    """

    kind: Kind
    index: int
    number: int
    call_id: str
    name: str
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Return the text so far; of a call, the arguments."""
        return "".join(self.texts)


class BlockReply(Reply):
    """One answer as blocks, the base of the routes that show it so.

    Attributes:
        blocks: Blocks so far. The last one is open until the answer ends.
        finish_reason: Reason of the end, None before.
        stop_string: Stop string that ended the answer, empty for any other end.
    """

    finish_reason: str | None = None
    stop_string = ""

    @cached_property
    def blocks(self) -> list[Block]:
        """Return the blocks so far."""
        return []

    def chunks(self, index: int, output: Output) -> list[Json]:
        """Count an output, and return the events of the blocks that it begins, continues and ends."""
        return [event for change, block, text in self._changes(output) for event in self._events(change, block, text)]

    @abstractmethod
    def _events(self, change: Change, block: Block, text: str) -> Iterator[Json]:
        """Yield the events of a change of a block, which adds a text or none."""

    def _changes(self, output: Output) -> Iterator[tuple[Change, Block, str]]:
        """Yield the changes of blocks that an output makes."""
        self.read(0, output)
        for piece in self.readers[0].take():
            block = self.blocks[-1] if self.blocks else None
            if block is None or (block.kind, block.number) != (piece.kind, piece.number):
                if block is not None:
                    yield "close", block, ""
                block = Block(piece.kind, len(self.blocks), piece.number, piece.call_id or "", piece.name or "")
                self.blocks.append(block)
                yield "open", block, ""
            if piece.text:
                block.texts.append(piece.text)
                yield "add", block, piece.text
        if output.finish_reason:
            self.finish_reason = self.reason(0, output)
            self.stop_string = output.stop_string
            if self.blocks:
                yield "close", self.blocks[-1], ""
