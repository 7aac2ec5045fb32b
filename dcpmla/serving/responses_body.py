"""Bodies of /v1/responses, checked, and the conversations that their items are.

Source: OpenAI's API reference of responses. What needs storage is refused by name.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from dcpmla.fields import whole
from dcpmla.runtime.grammar import Grammar
from dcpmla.serving.chat_body import ChatRequest, Effort
from dcpmla.serving.conversation import (
    MAX_MESSAGES,
    Conversation,
    History,
    reasoning_part,
    text_in,
    texts_of,
    thinking_of,
    tool_call,
)
from dcpmla.serving.engine_limits import MAX_TOKENS
from dcpmla.serving.errors import ApiError, wrong
from dcpmla.serving.refused import Fields, OpenFields, check_fields_of_body, refuse
from dcpmla.serving.responses_tools import arguments_with, functions_of, shown_name
from dcpmla.serving.sampling_fields import Ruled, SamplingFields, takes
from dcpmla.serving.shown import Json
from dcpmla.serving.structured import grammar_of_format
from dcpmla.serving.tools import Tools, chosen, tool_use

# Values that change nothing, by field.
_REFUSED: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("background_options", "conversation", "moderation", "previous_response_id", "prompt"), ()),
    **dict.fromkeys(("background", "store"), (False,)),
    "context_management": ([],),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
# The item of a reasoning has its text, which may be sent back. The others are about tools and images, which no answer
# has.
_INCLUDED = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
)
_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}  # the field of what a tool gets
_RESULTS = ("function_call_output", "custom_tool_call_output")


class ReasoningFields(OpenFields):
    """Fields of `reasoning`. There are no summaries: the item has the reasoning itself."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class _TextFields(Fields):
    format: dict[str, Any] | None = None


@takes("temperature", "top_p")
class ResponsesBody(ChatRequest):
    """A body of /v1/responses.

    Attributes:
        max_output_tokens: Limit of new tokens; by default what the prompt leaves of `--max-model-len`. More is treated
            as more max_tokens are.
    """

    limit_name: ClassVar[str] = "max_output_tokens"
    input: str | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    instructions: str | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Annotated[int | None, Ruled(whole(1, MAX_TOKENS))] = None
    reasoning: ReasoningFields | None = None
    text: _TextFields | None = None
    include: list[str] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    stream_options: dict[str, Any] | None = None

    def model_post_init(self, context: Any, /) -> None:
        """Forget unknown fields.

        Raises:
            ApiError: A field would change the answer or needs storage and is not served, or is misspelt.
        """
        advice = "this server stores nothing and answers at once; leave it out"
        check_fields_of_body(self, _REFUSED, advice, elsewhere=SamplingFields.model_fields)
        for name in self.include or []:
            refuse("include", name, _INCLUDED, f"{name[:100]!r} is not in {', '.join(_INCLUDED)}")

    @property
    def sampling(self) -> SamplingFields:
        return SamplingFields(max_tokens=self.max_output_tokens, **self.model_dump(include={"temperature", "top_p"}))

    def asked_grammar(self) -> tuple[Grammar | None, str]:
        wanted = None if self.text is None else self.text.format
        return grammar_of_format(wanted, "text.format"), "text.format.schema"

    def conversation(self) -> Conversation:
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        messages: list[Json] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        messages += messages_of(items)
        choice = self.tool_choice
        if isinstance(choice, dict) and choice.get("type") in ("function", "custom"):
            choice = {"type": "function", "name": shown_name(choice, "tool_choice")}
        use = chosen(tool_use(functions_of(self.tools), "parameters"), choice, self.parallel_tool_calls)
        self.input = ""
        effort = None if self.reasoning is None else self.reasoning.effort
        thinking, level = thinking_of(effort)
        return Conversation(messages, use, thinking=thinking, effort=level, reasoning_field="reasoning.effort")


def messages_of(items: Sequence[Mapping[str, Any]]) -> list[Json]:
    """Return the messages that items are. Reasoning, text and calls of one answer are one message.

    Raises:
        ApiError: An item is of another type, or has a wrong field.
    """
    history = History()
    for number, item in enumerate(items):
        path, kind = f"input.{number}", item.get("type", "message")
        if kind in ("reasoning", *_CALLS) or (kind == "message" and item.get("role") == "assistant"):
            history.add_part(_part(kind, item, path))
        elif kind == "message":
            history.add({"role": text_in(item, "role", path), "content": _content(item, "content", path)})
        elif kind in _RESULTS:
            call_id = text_in(item, "call_id", path)
            history.add({"role": "tool", "tool_call_id": call_id, "content": _content(item, "output", path)})
        else:
            raise ApiError(400, f"{path}: items of type {kind!r} are not supported", param=path)
    return history.messages


def _part(kind: str, item: Mapping[str, Any], path: str) -> Json:
    """Return the fields of a message that an item of an answer has."""
    if kind == "message":
        return {"content": _content(item, "content", path)}
    if kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            raise wrong(path, "has content that is no list of texts")
        return reasoning_part("".join(text_in(part, "text", path) for part in parts))
    name, text = shown_name(item, path), text_in(item, _CALLS[kind], path)
    arguments = text if kind == "function_call" else arguments_with(text)
    return {"tool_calls": [tool_call(text_in(item, "call_id", path), name, arguments)]}


def _content(item: Mapping[str, Any], name: str, path: str) -> str:
    return "".join(texts_of(item.get(name), f"{path}.{name}"))
