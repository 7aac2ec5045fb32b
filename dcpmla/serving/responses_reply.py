"""Answers in OpenAI's shape of responses, whole and as events."""

from collections.abc import Iterator
from functools import cached_property
from typing import Any

from dcpmla.serving.blocks import Block, BlockReply, Change
from dcpmla.serving.errors import ApiError
from dcpmla.serving.responses_body import ResponsesBody
from dcpmla.serving.responses_tools import ClientTool, client_tools, input_of
from dcpmla.serving.shown import Json

_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}
_PARTS = {"reasoning": "reasoning_text", "text": "output_text"}  # types of content, and names of events about a text


class ResponsesReply(BlockReply):
    """A response: an item for each block of the answer."""

    body: ResponsesBody
    _number = 0  # of the next event

    @cached_property
    def _tools(self) -> dict[str, ClientTool]:
        return client_tools(self.body.tools)

    def _tool(self, block: Block) -> ClientTool:
        """Return the tool that a call's function stands for."""
        return self._tools.get(block.name) or ClientTool(block.name)

    def whole(self) -> Json:
        """Return the response."""
        return self._response(self._status())

    def first_chunks(self) -> list[Json]:
        """Return the events before any token."""
        begun = self._response("in_progress")
        return [self._event(f"response.{name}", response=begun) for name in ("created", "in_progress")]

    def last_chunks(self) -> list[Json]:
        """Return the event of the end."""
        status = self._status()
        return [self._event(f"response.{status}", response=self._response(status))]

    def error(self, error: ApiError) -> Json:
        """Return the event of a response that fails."""
        failure = {"code": error.code or "server_error", "message": error.message}
        return self._event("response.failed", response={**self._response("failed"), "error": failure})

    def _status(self) -> str:
        return "incomplete" if self.finish_reason == "length" else "completed"

    def _response(self, status: str) -> Json:
        """Return the response with the blocks so far."""
        is_over, usage = status != "in_progress", self.usage
        return {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.model,
            **_fields(self.body),
            "output": [self._item(block, status) for block in self.blocks],
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            }
            if is_over
            else None,
        }

    def _event(self, kind: str, **fields: Any) -> Json:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _events(self, change: Change, block: Block, text: str) -> Iterator[Json]:
        if change == "open":
            begun = self._item(block, "in_progress")
            yield self._event("response.output_item.added", output_index=block.index, item=begun)
        place = {"output_index": block.index, "item_id": self._item_id(block)}
        if block.kind == "call":
            yield from self._call_events(change, block, text, place)
        else:
            yield from self._text_events(change, block, text, {**place, "content_index": 0})
        if change == "close":
            done = self._item(block, self._status())
            yield self._event("response.output_item.done", output_index=block.index, item=done)

    def _text_events(self, change: Change, block: Block, text: str, place: Json) -> Iterator[Json]:
        """Yield the events of a change of a reasoning or text, between those of its item."""
        name = f"response.{_PARTS[block.kind]}"
        logprobs: Json = {"logprobs": []} if block.kind == "text" else {}
        match change:
            case "open":
                yield self._event("response.content_part.added", **place, part=_part(block))
            case "add":
                yield self._event(f"{name}.delta", **place, delta=text, **logprobs)
            case "close":
                yield self._event(f"{name}.done", **place, text=block.text, **logprobs)
                yield self._event("response.content_part.done", **place, part=_part(block))

    def _call_events(self, change: Change, block: Block, text: str, place: Json) -> Iterator[Json]:
        """Yield the events of a change of a call, between those of its item. The input of a custom tool comes whole."""
        if self._tool(block).is_custom:
            if change == "close":
                given = input_of(block.text)
                yield self._event("response.custom_tool_call_input.delta", **place, delta=given)
                yield self._event("response.custom_tool_call_input.done", **place, input=given)
        elif change == "add":
            yield self._event("response.function_call_arguments.delta", **place, delta=text)
        elif change == "close":
            whole = {"arguments": block.text, "name": self._tool(block).name}
            yield self._event("response.function_call_arguments.done", **place, **whole)

    def _item(self, block: Block, status: str) -> Json:
        """Return the item of a block, without content if it begins; only the last one may be incomplete."""
        content = [] if status == "in_progress" or block.kind == "call" else [_part(block)]
        if status != "in_progress" and block is not self.blocks[-1]:
            status = "completed"
        item: Json = {"id": self._item_id(block), "status": "incomplete" if status == "failed" else status}
        match block.kind:
            case "reasoning":
                return {**item, "type": "reasoning", "summary": [], "content": content}
            case "text":
                return {**item, "type": "message", "role": "assistant", "content": content}
            case "call":
                return {**item, **self._tool(block).call(block.call_id, block.text)}

    def _item_id(self, block: Block) -> str:
        return f"{_PREFIXES[block.kind]}_{self.id}_{block.index}"


def _part(block: Block) -> Json:
    """Return the content of a block."""
    part: Json = {"type": _PARTS[block.kind], "text": block.text}
    return {**part, "annotations": [], "logprobs": []} if block.kind == "text" else part


def _fields(body: ResponsesBody) -> Json:
    """Return the response's fields that repeat the body."""
    reasoning, params = body.reasoning, body.sampling.params(1, None, None)
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": reasoning and reasoning.effort, "summary": reasoning and reasoning.summary},
        "store": False,
        "temperature": params.temperature,
        "text": {"format": (body.text and body.text.format) or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_p": params.top_p,
        "truncation": "disabled",
    }
