"""Answers in Anthropic's shape of messages, whole and as events."""

import json
import uuid
from collections.abc import Iterator

from dcpmla.serving.anthropic_body import MessagesBody
from dcpmla.serving.blocks import Block, BlockReply, Change
from dcpmla.serving.errors import ApiError
from dcpmla.serving.messages import Output
from dcpmla.serving.prompts import Prompt, Texts
from dcpmla.serving.reader import AnswerReader
from dcpmla.serving.shown import Json

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesReply(BlockReply):
    """A message: a content block for each block of the answer."""

    def __init__(self, model: str, prompts: list[Prompt], reader: AnswerReader, omits_thinking: bool) -> None:
        super().__init__(prompts, reader)
        self._model, self._omits_thinking, self._id = model, omits_thinking, uuid.uuid4().hex

    def whole(self) -> Json:
        """Return the message."""
        return {**self._message(), "content": [self._content(block, block.text) for block in self.blocks.all]}

    def first_chunks(self) -> list[Json]:
        """Return the events before any token."""
        return [{"type": "message_start", "message": {**self._message(), "content": []}}, {"type": "ping"}]

    def chunks(self, index: int, output: Output) -> list[Json]:
        """Return the events of an output."""
        return [event for change in self._changes(output) for event in self._events(change)]

    def last_chunks(self) -> list[Json]:
        """Return the events of the end."""
        message = self._message()
        delta = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        return [{"type": "message_delta", "delta": delta, "usage": message["usage"]}, {"type": "message_stop"}]

    def error(self, error: ApiError) -> Json:
        """Return the event of an answer that fails."""
        return error.anthropic_body()

    def _message(self) -> Json:
        """Return the message without its content."""
        usage, reason = self.usage, _REASONS.get(self.finish_reason or "")
        stop = self.stop_string if reason == "end_turn" and self.stop_string else None
        return {
            "id": f"msg_{self._id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "stop_reason": reason if stop is None else "stop_sequence",
            "stop_sequence": stop,
            "usage": {
                "input_tokens": usage.prompt_tokens - usage.cached_tokens,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": usage.cached_tokens,
                "output_tokens": usage.completion_tokens,
            },
        }

    def _events(self, change: Change) -> Iterator[Json]:
        """Yield the events of a change."""
        block = change.block
        place = {"index": block.index}
        match change.action:
            case "open":
                begun = self._content(block, "")
                if block.kind == "reasoning":
                    begun["signature"] = ""
                yield {"type": "content_block_start", **place, "content_block": begun}
            case "add":
                if (delta := self._delta(block, change.text)) is not None:
                    yield {"type": "content_block_delta", **place, "delta": delta}
            case "close":
                if block.kind == "reasoning":
                    signature = {"type": "signature_delta", "signature": self._id}
                    yield {"type": "content_block_delta", **place, "delta": signature}
                yield {"type": "content_block_stop", **place}

    def _delta(self, block: Block, text: str) -> Json | None:
        """Return what a text adds to a block, None if it is not shown."""
        if block.kind == "reasoning":
            return None if self._omits_thinking else {"type": "thinking_delta", "thinking": text}
        if block.kind == "text":
            return {"type": "text_delta", "text": text}
        return {"type": "input_json_delta", "partial_json": text}

    def _content(self, block: Block, text: str) -> Json:
        """Return the content block with a text. Clients send signatures back; this server does not check them."""
        match block.kind:
            case "reasoning":
                thinking = "" if self._omits_thinking else text
                return {"type": "thinking", "thinking": thinking, "signature": self._id}
            case "text":
                return {"type": "text", "text": text}
            case "call":
                return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _values(text)}


def messages_reply(
    body: MessagesBody, texts: Texts, model: str, prompts: list[Prompt], readers: list[AnswerReader]
) -> MessagesReply:
    """Return the answer to a body, before any token."""
    omits_thinking = body.thinking is not None and body.thinking.display == "omitted"
    return MessagesReply(model, prompts, readers[0], omits_thinking)


def _values(arguments: str) -> Json:
    """Return the arguments of a call; an answer that was cut has none."""
    try:
        values = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}
