"""Blocks of an answer: its reasoning, texts and tool calls in the order in which they come, and its usage."""

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from dcpmla.serving.chat.events import Kind
from dcpmla.serving.chat_body import ChatRequest
from dcpmla.serving.messages import Output
from dcpmla.serving.prompts import Prompt, Texts
from dcpmla.serving.reader import AnswerReader
from dcpmla.serving.shown import Json, Usage

Body = TypeVar("Body", bound=ChatRequest)
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


class BlockReply(Generic[Body]):
    """One answer as blocks, the base of the routes that show it so.

    Args:
        readers: Reader of the one answer.

    Attributes:
        blocks: Blocks so far. The last one is open until the answer ends.
        finish_reason: Reason of the end, None before.
        stop_string: Stop string that ended the answer, empty for any other end.
    """

    ending = ""
    num_choices = 1

    def __init__(
        self, body: Body, texts: Texts, model: str, prompts: list[Prompt], readers: Sequence[AnswerReader]
    ) -> None:
        self.body, self.model, self.prompts, (self._reader,) = body, model, prompts, readers
        self.id, self.created = uuid.uuid4().hex, int(time.time())
        self.usage = Usage(sum(len(prompt.token_ids) for prompt in prompts))
        self.blocks: list[Block] = []
        self.finish_reason: str | None = None
        self.stop_string = ""

    def drop_prompts(self) -> None:
        """Forget the prompts."""
        self.prompts.clear()

    def add(self, index: int, output: Output) -> None:
        """Take outputs of the whole answer, joined."""
        self.chunks(index, output)

    def chunks(self, index: int, output: Output) -> list[Json]:
        """Count an output, and return the events of the blocks that it begins, continues and ends."""
        return [event for change, block, text in self._changes(output) for event in self._events(change, block, text)]

    def _events(self, change: Change, block: Block, text: str) -> Iterator[Json]:
        """Yield the events of a change of a block, which adds a text or none."""
        raise NotImplementedError

    def _changes(self, output: Output) -> Iterator[tuple[Change, Block, str]]:
        """Yield the changes of blocks that an output makes."""
        self.usage.count(output)
        for piece in self._reader.push(output):
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
        self.usage.reasoning_tokens = self._reader.num_reasoning_tokens
        if output.finish_reason:
            self.finish_reason = self._reader.finish_reason(output.finish_reason)
            self.stop_string = output.stop_string
            if self.blocks:
                yield "close", self.blocks[-1], ""
