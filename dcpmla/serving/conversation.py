"""Conversations, the common form of all routes of chats, and the messages of chat completions."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from dcpmla.serving.errors import ApiError, wrong
from dcpmla.serving.refused import Fields, OpenFields
from dcpmla.serving.shown import Json
from dcpmla.serving.tools import ToolUse

MAX_MESSAGES = 1 << 14
# Types of content's parts, with the field that has the text.
TEXT_FIELDS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


@dataclass(frozen=True)
class Conversation:
    """A conversation that the model is to continue.

    Attributes:
        messages: Messages of chat completions; contents and arguments of calls are text.
        tool_use: Tools, and what the answer may do with them.
        variables: Variables of the template that the client gives.
        thinking: Whether the model reasons first, None for the template's default.
        effort: Level of the reasoning's effort, None for the template's default.
        reasoning_field: Name of the field that asks for reasoning; empty if a model without it is fine.
        add_generation_prompt: Whether the prompt begins the answer.
        continue_final_message: Whether the prompt leaves the last message open.
        defaults: Variables of the template that the server gives, where the client does not.
    """

    messages: list[Json]
    tool_use: ToolUse = field(default_factory=ToolUse)
    variables: Mapping[str, Any] = field(default_factory=dict)
    thinking: bool | None = None
    effort: str | None = None
    reasoning_field: str = ""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_characters(self) -> int:
        """Return a bound of the characters of all messages, tools and variables: the bytes of their JSON."""
        return len(msgspec.json.encode([self.messages, [*self.tool_use.tools], self.variables]))

    @property
    def num_calls(self) -> int:
        """Return the number of tool calls in all messages."""
        return sum(len(message.get("tool_calls", ())) for message in self.messages)


def tool_call(call_id: str | None, name: str, arguments: str | Mapping[str, Any]) -> Json:
    """Return a tool call in the shape of chat completions, its arguments as text.

    The text may be no JSON: clients send back what a model wrote, and what the limit of tokens has cut.
    """
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    call: Json = {"type": "function", "function": {"name": name, "arguments": text or "{}"}}
    return call if call_id is None else {"id": call_id, **call}


def thinking_of(effort: str | None) -> tuple[bool | None, str | None]:
    """Return whether an effort is reasoning at all, and its level; None where nothing is asked for."""
    return (None, None) if effort is None else (effort != "none", None if effort == "none" else effort)


class History:
    """Messages, written part by part. Reasoning, then text, then calls of one answer are one message.

    So is what follows calls before their results. A message has no order of texts and calls: its texts come first.
    """

    def __init__(self) -> None:
        self.messages: list[Json] = []
        self._answer: Json | None = None  # the last message, if it is an answer

    def add(self, message: Json) -> None:
        """Add a whole message."""
        self.messages.append(message)
        self._answer = None

    def add_part(self, part: Json) -> None:
        """Add a part of an answer: content, reasoning, or calls."""
        if not part:
            return
        if self._answer is None or not self._follows(part, self._answer):
            self._answer = {"role": "assistant", "content": ""}
            self.messages.append(self._answer)
        for name, value in part.items():
            self._answer[name] = self._answer[name] + value if name in self._answer else value

    @staticmethod
    def _follows(part: Json, answer: Json) -> bool:
        """Return whether a part belongs to the same answer as the present parts."""
        if "tool_calls" in part or "tool_calls" in answer:
            return True
        return not answer["content"] and not part.keys() & {"reasoning"} & answer.keys()


def reasoning_part(text: str) -> Json:
    """Return the fields of a message with a reasoning, none for an empty one."""
    return {"reasoning_content": text, "reasoning": text} if text else {}


class _Function(Fields):
    name: str
    arguments: str | dict[str, Any] | None = None


class ChatToolCall(Fields):
    """A tool call of an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: _Function


class ChatMessage(OpenFields):
    """A message of a conversation in chat completions."""

    role: str
    content: Any = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ChatToolCall] | None = None
    tool_call_id: str | None = None

    def for_template(self, number: int) -> Json:
        """Return the message as a chat template sees it.

        Raises:
            ApiError: The content is no text.
        """
        path = f"messages.{number}"
        content = "" if self.content is None else "".join(texts_of(self.content, f"{path}.content"))
        message: Json = {"role": self.role, "content": content}
        message |= self.model_dump(include={"name", "tool_call_id"}, exclude_none=True)
        reasoning = self.reasoning if self.reasoning_content is None else self.reasoning_content
        message |= reasoning_part(reasoning or "")
        if self.tool_calls:
            message["tool_calls"] = [
                tool_call(call.id, call.function.name, call.function.arguments or "") for call in self.tool_calls
            ]
        return message


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


def text_in(fields: Mapping[str, Any], name: str, path: str) -> str:
    """Return a field that must be a text.

    Args:
        path: Path of the fields in the body.
    Raises:
        ApiError: It is no text.
    """
    value = fields.get(name)
    if not isinstance(value, str):
        raise wrong(f"{path}.{name}", f"is {value!r:.100}; it must be a string")
    return value


def texts_of(content: Any, path: str) -> Iterator[str]:
    """Yield the texts of a content: a text, a part, or a list of contents.

    Raises:
        ApiError: A part is no text.
    """
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for part in content:
            yield from texts_of(part, path)
    else:
        kind = content.get("type") if isinstance(content, dict) else None
        text = content.get(TEXT_FIELDS[kind]) if isinstance(kind, str) and kind in TEXT_FIELDS else None
        if not isinstance(text, str):
            raise ApiError(400, f"content of type {kind!r} is not supported; give texts", param=path)
        yield text
