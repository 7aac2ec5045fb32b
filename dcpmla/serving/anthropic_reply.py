"""Answers in Anthropic's shape of messages, whole and as events."""

from collections.abc import Iterator

from dcpmla.serving.anthropic_body import MessagesBody, signature_of
from dcpmla.serving.blocks import Block, BlockReply, Change
from dcpmla.serving.chat.values import object_of
from dcpmla.serving.errors import ApiError
from dcpmla.serving.shown import Json

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
# Types of what a text adds to a block, with the field that has the text.
_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


class MessagesReply(BlockReply):
    """A message: a content block for each block of the answer."""

    body: MessagesBody

    @property
    def _omits_thinking(self) -> bool:
        return self.body.thinking is not None and self.body.thinking.display == "omitted"

    def whole(self) -> Json:
        """Return the message."""
        return {**self._message(), "content": [self._content(block, block.text) for block in self.blocks]}

    def first_chunks(self) -> list[Json]:
        """Return the events before any token."""
        return [{"type": "message_start", "message": {**self._message(), "content": []}}, {"type": "ping"}]

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
            "id": f"msg_{self.id}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "stop_reason": reason if stop is None else "stop_sequence",
            "stop_sequence": stop,
            "usage": {
                "input_tokens": usage.prompt_tokens - usage.cached_tokens,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": usage.cached_tokens,
                "output_tokens": usage.completion_tokens,
            },
        }

    def _signature(self, reasoning: str) -> str:
        return signature_of(reasoning) if self._omits_thinking else self.id

    def _events(self, change: Change, block: Block, text: str) -> Iterator[Json]:
        place = {"index": block.index}
        match change:
            case "open":
                begun = self._content(block, "")
                if block.kind == "reasoning":
                    begun["signature"] = ""
                yield {"type": "content_block_start", **place, "content_block": begun}
            case "add":
                if block.kind != "reasoning" or not self._omits_thinking:
                    kind, name = _DELTAS[block.kind]
                    yield {"type": "content_block_delta", **place, "delta": {"type": kind, name: text}}
            case "close":
                if block.kind == "reasoning":
                    signature = {"type": "signature_delta", "signature": self._signature(block.text)}
                    yield {"type": "content_block_delta", **place, "delta": signature}
                yield {"type": "content_block_stop", **place}

    def _content(self, block: Block, text: str) -> Json:
        """Return the content block with a text; a call that was cut has no input.

        Clients send signatures back; this server does not check them.
        """
        match block.kind:
            case "reasoning":
                thinking = "" if self._omits_thinking else text
                return {"type": "thinking", "thinking": thinking, "signature": self._signature(text)}
            case "text":
                return {"type": "text", "text": text}
            case "call":
                return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": object_of(text) or {}}
