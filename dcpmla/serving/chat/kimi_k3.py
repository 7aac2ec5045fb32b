"""The published encoding of Kimi-K3, whose checkpoint has no chat template.

Source: `encoding_k3.py` of the checkpoint.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dcpmla.serving.chat.dsml import Message, check_last, dumps, prepare, reasoning_of, text_of

_ROLES = ("system", "developer", "user", "assistant", "tool")
_END = "<|end_of_msg|>"
_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{}\n```"
_EFFORT = """`thinking_effort` guides on how much to think in your thinking channel (not including the response \
channel), supported values include `low`, `medium`, `high`, and `max`.
Now the system is invoked with `thinking_effort={}`."""
_EFFORTS = {
    None: "max",
    "minimal": "low",
    "low": "low",
    "medium": "high",
    "high": "high",
    "xhigh": "max",
    "max": "max",
}
_TYPES = {bool: "boolean", int: "number", float: "number", str: "string", dict: "object", list: "array"}


class KimiK3:
    """The encoding of Kimi-K3: elements of messages, channels, calls and arguments.

    Every answer keeps its reasoning. Results follow the order of their calls.
    """

    thinks_by_default = True

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
        *,
        thinking: bool,
        reasoning_effort: str | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
    ) -> str:
        """Return a conversation as the model reads it.

        Raises:
            ValueError: An unknown role or level of effort, a result without its call, or a last message that cannot
                be continued.
        """
        if reasoning_effort not in _EFFORTS:
            names = ", ".join(name for name in _EFFORTS if name)
            raise ValueError(f"reasoning_effort: {reasoning_effort!r} is not in {names}")
        conversation = prepare(messages, None, _ROLES)
        if continue_final_message:
            check_last(conversation)
        pieces = []
        if tools:
            schemas = json.dumps(_sorted(list(tools)), ensure_ascii=False, separators=(",", ":"))
            pieces.append(_message(_TOOLS.format(schemas), role="system", type="tool-declare"))
        if thinking:
            pieces.append(_message(_EFFORT.format(_EFFORTS[reasoning_effort]), role="system", type="thinking-effort"))
        last = conversation.pop() if continue_final_message else None
        pieces += _messages(conversation, thinking)
        if last is not None:
            text = _message(_answer(last, thinking), **_names(last))
            pieces.append(text[: _open_length(text, last, thinking)])
        elif add_generation_prompt:
            pieces.append(_open("message", role="assistant") + _open("think" if thinking else "response"))
        return "".join(pieces)


def _messages(messages: Sequence[Message], thinking: bool) -> Iterator[str]:
    """Yield the texts of messages, results in the order of their calls and numbered from 1 after each answer."""
    calls: dict[str, tuple[int, str]] = {}  # order and name of each call of the last answer
    results: list[tuple[int, str, str]] = []
    num_results = 0
    for number, message in enumerate([*messages, None]):
        if message is not None and message["role"] == "tool":
            if message.get("tool_call_id") not in calls:
                raise ValueError(f"messages: result {number} has no call {message.get('tool_call_id')!r} before it")
            results.append((*calls[message["tool_call_id"]], text_of(message, "")))
            continue
        for _, name, text in sorted(results, key=lambda result: result[0]):
            num_results += 1
            yield _message(text, role="tool", tool=name, index=num_results)
        results = []
        if message is None:
            return
        role = "system" if message["role"] == "developer" else message["role"]
        if role == "assistant":
            num_results = 0
            ordered = enumerate(message.get("tool_calls") or ())
            calls = {call.get("id") or "": (order, call["function"]["name"]) for order, call in ordered}
        content = _answer(message, thinking) if role == "assistant" else text_of(message, "")
        yield _message(content, **{**_names(message), "role": role})


def _names(message: Message) -> dict[str, str]:
    name = message.get("name")
    return {"role": message["role"], **({"name": name} if name else {})}


def _answer(message: Message, thinking: bool) -> str:
    """Return the channels of an assistant's message."""
    reasoning = reasoning_of(message)
    text = _element("think", reasoning if reasoning.strip() else "") if thinking else ""
    text += _element("response", text_of(message, ""))
    calls = message.get("tool_calls") or ()
    elements = [
        _element("call", _arguments(call["function"].get("arguments")), tool=call["function"]["name"], index=order)
        for order, call in enumerate(calls, 1)
    ]
    return text + (_element("tools", "".join(elements)) if elements else "")


def _open_length(text: str, message: Message, thinking: bool) -> int:
    """Return the length of an assistant's message without the ends of the channel that goes on."""
    if message.get("tool_calls"):
        return text.rindex(_close("message"))
    is_reasoning = thinking and reasoning_of(message) and not text_of(message)
    return text.index(_close("think")) if is_reasoning else text.rindex(_close("response"))


def _arguments(arguments: Any) -> str:
    """Return the elements of a call's arguments; a text that is no JSON is one element."""
    if isinstance(arguments, str) and arguments.strip():
        try:
            values = json.loads(arguments)
        except (ValueError, RecursionError):
            return _element("json", arguments, type="object")
    else:
        values = arguments or {}
    if not isinstance(values, Mapping):
        raise ValueError(f"messages: arguments {arguments!r} are no JSON object")
    return "".join(
        _element(
            "argument",
            value if isinstance(value, str) else dumps(value),
            key=key,
            type=_TYPES.get(type(value), "null"),
        )
        for key, value in values.items()
    )


def _message(text: str, /, **attributes: object) -> str:
    return _element("message", text, **attributes) + _END


def _element(tag: str, text: str, /, **attributes: object) -> str:
    return _open(tag, **attributes) + text + _close(tag)


def _open(tag: str, /, **attributes: object) -> str:
    escaped = {key: str(value).replace("&", "&amp;").replace('"', "&quot;") for key, value in attributes.items()}
    return "".join((f"<|open|>{tag}", *(f' {key}="{value}"' for key, value in escaped.items()), "<|sep|>"))


def _close(tag: str) -> str:
    return f"<|close|>{tag}<|sep|>"


def _sorted(value: Any) -> Any:
    """Return a value whose objects have sorted keys."""
    if isinstance(value, Mapping):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list) else value
