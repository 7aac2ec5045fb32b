"""Parts of DeepSeek's encodings: tokens, tools, calls in DSML, the fields of messages."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT, SYSTEM, REMINDER = "<｜User｜>", "<｜Assistant｜>", "<｜System｜>", "<｜latest_reminder｜>"
THINK, END_THINK = "<think>", "</think>"


def dumps(value: object) -> str:
    """Return JSON as the published encoders write it."""
    return json.dumps(value, ensure_ascii=False)


def text_of(message: Message, separator: str = "\n\n") -> str:
    """Return the text of a message's content: a text, or texts of parts joined by a separator."""
    content = message.get("content")
    if isinstance(content, list):
        return separator.join(str(part["text"]) for part in content)
    return "" if content is None else str(content)


def reasoning_of(message: Message) -> str:
    """Return the reasoning of an assistant's message."""
    return str(message.get("reasoning_content") or message.get("reasoning") or "")


def prepare(
    messages: Sequence[Message], tools: Sequence[Message] | None, roles: Sequence[str], *, marks_systems: bool = False
) -> list[dict[str, Any]]:
    """Return messages whose first one is a system's and has the request's tools in place of its own.

    Developers' messages at the start are a system's messages: the encoders write that role as a user's. A system's
    later messages are a developer's, unless the encoder marks them: others write them into the message before.

    Args:
        marks_systems: Whether the encoder marks a system's later messages.
    Raises:
        ValueError: A message has another role.
    """
    copied = [dict(message) for message in messages]
    for number, message in enumerate(copied):
        if message["role"] not in roles:
            raise ValueError(f"messages: role {message['role']!r} of message {number} is not in {', '.join(roles)}")
    is_start = True
    for message in copied:
        is_start = is_start and message["role"] in ("system", "developer")
        if is_start:
            message["role"] = "system"
        elif message["role"] == "system" and not marks_systems:
            message["role"] = "developer"
    if tools:
        if not copied or copied[0]["role"] != "system":
            copied.insert(0, {"role": "system", "content": ""})
        copied[0]["tools"] = tools
    return copied


def schemas_of(tools: Sequence[Message]) -> str:
    """Return the schemas of tools, a line for each."""
    return "\n".join(dumps(tool["function"]) for tool in tools)


def arguments_of(call: Message) -> Mapping[str, Any]:
    """Return the arguments of a call. A text that is no JSON object is the argument `arguments`."""
    arguments = call["function"].get("arguments") or {}
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return arguments if isinstance(arguments, Mapping) else {"arguments": call["function"]["arguments"]}


def render_calls(calls: Sequence[Message], section: str, space: str = "") -> str:
    """Return calls in DSML, with the blank line before them; nothing without calls.

    Args:
        section: Name of the element around them.
        space: Text between the token DSML and the name of an element.
    """
    if not calls:
        return ""
    open_, close = f"<｜DSML｜{space}", f"</｜DSML｜{space}"

    def lines() -> Iterator[str]:
        for call in calls:
            yield f'{open_}invoke name="{call["function"]["name"]}">'
            yield "\n".join(
                f'{open_}parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">'
                f"{value if isinstance(value, str) else dumps(value)}{close}parameter>"
                for key, value in arguments_of(call).items()
            )
            yield f"{close}invoke>"

    return "\n".join(("", "", f"{open_}{section}>", *lines(), f"{close}{section}>"))


def render_answer(message: Message, section: str, space: str = "", *, reasons: bool, goes_on: bool) -> str:
    """Return the text of an assistant's message.

    Args:
        section: Name of the element around calls.
        space: Text between the token DSML and the name of an element.
        reasons: Whether the message has reasoning, which may be empty.
        goes_on: Whether the model continues the message: its reasoning, if it has nothing else.
    """
    reasoning, text = reasoning_of(message), text_of(message)
    calls = render_calls(message.get("tool_calls") or (), section, space)
    is_reasoning = goes_on and reasoning and not text and not calls
    start = reasoning + ("" if is_reasoning else END_THINK) if reasons else ""
    return start + text + calls + ("" if goes_on else EOS)


def check_last(messages: Sequence[Message]) -> None:
    """Check that the last message may be continued.

    Raises:
        ValueError: It is not the assistant's.
    """
    if not messages or messages[-1]["role"] != "assistant":
        raise ValueError("continue_final_message: the last message must be the assistant's")
