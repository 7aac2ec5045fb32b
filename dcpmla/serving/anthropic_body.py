"""Bodies of /v1/messages, checked, and the conversations that they are.

Source: Anthropic's API reference of messages.
"""

from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from dcpmla.fields import Rule, whole
from dcpmla.runtime.grammar import Grammar
from dcpmla.serving.chat.values import dumps
from dcpmla.serving.chat_body import ChatRequest, Effort
from dcpmla.serving.conversation import MAX_MESSAGES, Conversation, History, reasoning_part, text_in, tool_call
from dcpmla.serving.engine_limits import LIMITS, MAX_TOKENS
from dcpmla.serving.errors import ApiError, wrong
from dcpmla.serving.refused import Fields, OpenFields, check_fields_of_body
from dcpmla.serving.sampling_fields import Ruled, SamplingFields, takes
from dcpmla.serving.shown import Json
from dcpmla.serving.structured import grammar_of_format
from dcpmla.serving.tools import Tools, ToolUse, by_path, chosen, tool_use

# Values that change nothing, by field.
_REFUSED: dict[str, tuple[object, ...]] = {"container": (), "mcp_servers": ([],), "prefill": ()}
_KEPT_THINKING = "clear_thinking_"  # Which reasoning a prompt keeps, the chat template decides.
_SERVER_SEARCH = "tool_search_tool_"  # begins the types of tools by which the provider's server finds deferred tools
_SIGNED = "text:"  # begins signatures that have a text
_BILLING = "x-anthropic-billing-header:"

_STOPS = Rule(LIMITS["stop"].words, lambda value: isinstance(value, list) and LIMITS["stop"].holds(tuple(value)))

Blocks = list[dict[str, Any]]


class _Message(Fields):
    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class _ToolChoice(Fields):
    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _Thinking(Fields):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1)
    display: Annotated[str, StringConstraints(max_length=32)] | None = None  # "omitted" alone has an effect


class _OutputConfig(OpenFields):
    effort: Effort | None = None
    format: dict[str, Any] | None = None


class CountBody(ChatRequest):
    """A body of /v1/messages/count_tokens: a conversation."""

    messages: Annotated[list[_Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: str | Blocks | None = None
    tools: Tools | None = None
    tool_choice: _ToolChoice | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None
    context_management: dict[str, Any] | None = None

    def model_post_init(self, context: Any, /) -> None:
        """Forget unknown fields.

        Raises:
            ApiError: A field would change the answer and is not served, or is misspelt.
        """
        check_fields_of_body(self, _REFUSED, elsewhere=SamplingFields.model_fields)
        if not all(map(_keeps_thinking, (self.context_management or {}).values())):
            raise wrong("context_management", "is not supported; leave it out")

    def conversation(self) -> Conversation:
        history = History()
        tools = {tool["name"]: tool for tool in self.tools or () if isinstance(tool.get("name"), str)}
        if self.system:
            _add(history, _Message(role="system", content=self.system), "system", tools)
        for number, message in enumerate(self.messages):
            _add(history, message, f"messages.{number}.content", tools)
        last = self.messages[-1].role == "assistant"
        if last and "tool_calls" in history.messages[-1]:
            raise ApiError(400, "the last message has tool_use without a tool_result after it", param="messages")
        fields = {**self._thinking(), "add_generation_prompt": not last, "continue_final_message": last}
        conversation = Conversation(history.messages, self._tool_use(), **fields)
        self.messages.clear()
        self.system = self.tools = None
        return conversation

    def _tool_use(self) -> ToolUse:
        tools = tool_use(by_path(self.tools), "input_schema", (None, "custom", "function"))
        wanted = self.tool_choice or _ToolChoice(type="auto")
        choices: dict[str, str | Json] = {"any": "required", "tool": {"type": "function", "name": wanted.name}}
        use = chosen(tools, choices.get(wanted.type, wanted.type), not wanted.disable_parallel_tool_use)
        return replace(use, deferred=_deferred(self.tools or ()))

    def _thinking(self) -> dict[str, Any]:
        """Return the conversation's fields of reasoning."""
        kind = None if self.thinking is None else self.thinking.type
        effort = None if self.output_config is None else self.output_config.effort
        if kind == "disabled":
            return {"thinking": False}
        if effort is not None:
            return {"thinking": True, "effort": effort, "reasoning_field": "output_config.effort"}
        return {"thinking": kind and True, "reasoning_field": "thinking" if kind == "enabled" else ""}


@takes("temperature", "top_p", "top_k")
class MessagesBody(CountBody):
    """A body of /v1/messages.

    Attributes:
        stop_sequences: Strings that end the request; the answer's `stop_sequence` is the string that ended it.
    """

    max_tokens: Annotated[int, Ruled(whole(1, MAX_TOKENS))]
    stop_sequences: Annotated[list[str] | None, Ruled(_STOPS)] = None
    output_format: dict[str, Any] | None = None  # the older name of output_config.format

    @property
    def sampling(self) -> SamplingFields:
        fields = self.model_dump(include={"max_tokens", "temperature", "top_p", "top_k"})
        return SamplingFields.model_validate({**fields, "stop": self.stop_sequences})

    def asked_grammar(self) -> tuple[Grammar | None, str]:
        own = None if self.output_config is None else self.output_config.format
        wanted, path = (own, "output_config.format") if own else (self.output_format, "output_format")
        return grammar_of_format(wanted, path), f"{path}.schema"


def _keeps_thinking(edits: Any) -> bool:
    """Return whether edits of a context are about thinking alone."""
    return isinstance(edits, list) and all(
        isinstance(edit, dict) and str(edit.get("type")).startswith(_KEPT_THINKING) for edit in edits
    )


def _deferred(tools: Sequence[Json]) -> frozenset[str]:
    """Return the names of tools that are found by a search; none if the provider's server would search."""
    if any(str(tool.get("type")).startswith(_SERVER_SEARCH) for tool in tools):
        return frozenset()
    return frozenset(str(tool.get("name")) for tool in tools if tool.get("defer_loading") is True)


def _add(history: History, message: _Message, path: str, tools: Mapping[str, Json]) -> None:
    """Add a message to a history: results of tools become messages of their own.

    Args:
        path: Path of the content in the body.
        tools: Tools of the body by their names, which results may refer to.
    """
    blocks = [{"type": "text", "text": message.content}] if isinstance(message.content, str) else message.content
    if message.role == "assistant":
        for number, block in enumerate(blocks):
            history.add_part(_part(block, f"{path}.{number}"))
        return
    texts: list[str] = []
    for number, block in enumerate(blocks):
        place = f"{path}.{number}"
        if block.get("type") == "tool_result" and message.role == "user":
            if texts:
                history.add({"role": "user", "content": "".join(texts)})
                texts.clear()
            content = _texts(block.get("content") or "", f"{place}.tool_result.content", tools)
            history.add({"role": "tool", "tool_call_id": text_in(block, "tool_use_id", place), "content": content})
        else:
            text = _text(block, place)
            if message.role == "user" or (text := _without_billing(text)):
                texts.append(text)
    if texts:
        history.add({"role": message.role, "content": "".join(texts)})


def _without_billing(text: str) -> str:
    """Return a system's text without Claude Code's first line.

    It has a hash of the request, so a prompt that begins with it shares no block of the cache with any other.
    """
    return text.partition("\n")[2] if text.startswith(_BILLING) else text


def _part(block: Mapping[str, Any], path: str) -> Json:
    """Return the fields of a message that a block of an answer has."""
    match block.get("type"):
        case "thinking":
            return reasoning_part(text_in(block, "thinking", path) or _signed_text(block.get("signature")))
        case "redacted_thinking":
            return {}
        case "tool_use":
            values = block.get("input")
            if not isinstance(values, dict):
                raise wrong(f"{path}.input", "must be a JSON object")
            return {"tool_calls": [tool_call(text_in(block, "id", path), text_in(block, "name", path), values)]}
        case _:
            return {"content": _text(block, path)}


def signature_of(reasoning: str) -> str:
    """Return the signature of a reasoning that the client does not want to see, but sends back: its text."""
    return _SIGNED + b64encode(reasoning.encode()).decode()


def _signed_text(signature: Any) -> str:
    """Return the text of a signature, empty for that of another server."""
    if not isinstance(signature, str) or not signature.startswith(_SIGNED):
        return ""
    try:
        return b64decode(signature.removeprefix(_SIGNED), validate=True).decode()
    except ValueError:
        return ""


def _texts(content: Any, path: str, tools: Mapping[str, Json]) -> str:
    """Return the text of a tool's result: a text, or blocks of texts and of references to tools that it has found.

    Raises:
        ApiError: A block is of another type, or a reference leads to no tool.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(path, "must be a text or a list of blocks")
    texts = []
    for number, block in enumerate(content):
        place = f"{path}.{number}"
        if isinstance(block, dict) and block.get("type") == "tool_reference":
            name = text_in(block, "tool_name", place)
            if name not in tools:
                raise wrong(f"{place}.tool_name", f"is {name[:100]!r}, which tools does not have")
            texts.append(_definition(tools[name]))
        else:
            texts.append(_text(block, place))
    return "".join(texts)


def _definition(tool: Json) -> str:
    """Return the definition of a tool as a text. Claude Code describes it so to the model."""
    fields = {"description": tool.get("description"), "name": tool["name"], "parameters": tool.get("input_schema")}
    return f"<functions>\n<function>{dumps(fields)}</function>\n</functions>\n"


def _text(block: Any, path: str) -> str:
    """Return the text of a block.

    Raises:
        ApiError: It is no text. The message begins as that of Anthropic's API, by which Claude Code finds an image that
            the model cannot read; it asks again without it.
    """
    kind = block.get("type") if isinstance(block, dict) else None
    if kind != "text":
        raise wrong(f"{path}.{kind!s:.64}", "is not supported here; give blocks of type text")
    return text_in(block, "text", path)
