"""Conversations for the encodings of models without a template."""

import json
from typing import Any

Message = dict[str, Any]


def tool(name: str, **properties: Any) -> Message:
    parameters = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    return {"type": "function", "function": {"name": name, "description": f"Uses {name}.", "parameters": parameters}}


def called(number: int, name: str, **arguments: Any) -> Message:
    text = json.dumps(arguments, ensure_ascii=False)
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": text}}


def result(number: int, text: str) -> Message:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": text}


def said(role: str, text: str | None, reasoning: str = "", calls: list[Message] | None = None) -> Message:
    message: Message = {"role": role, "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    return message | ({"tool_calls": calls} if calls else {})


TOOLS = [
    tool("read_file", path={"type": "string"}, lines={"type": "array", "items": {"type": "integer"}}),
    tool("list_files"),
]
SYSTEM = said("system", "You fix code.")
_CALLS = [
    called(1, "read_file", path='a "b"/é.py', lines=[1, 20]),
    called(2, "list_files"),
    called(3, "read_file", path="</think>", deep={"a": [None, True, 1.5, "🙂"]}),
]
CONVERSATIONS = {
    "question": [said("user", "Why?")],
    "system": [SYSTEM, said("user", "Why?")],
    "turns": [
        SYSTEM,
        said("user", "Why?"),
        said("assistant", "So.", "I think so."),
        said("user", "Really?"),
        said("assistant", "Yes.", "Again."),
        said("user", "Thanks\n\n"),
    ],
    "answered": [said("user", "Why?"), said("assistant", "So.", "I think so.")],
    "developer": [said("user", "Why?"), said("assistant", "So.", "Hm."), said("developer", "Be long.")],
    "calls": [
        SYSTEM,
        said("user", "Fix it."),
        said("assistant", "I look.", "Two files.", _CALLS[:2]),
        result(1, "x = 1"),
        result(2, "a.py\nb.py"),
        said("assistant", None, "One more.", _CALLS[2:]),
        result(3, '{"ok": true}'),
    ],
    "after calls": [
        said("user", "Fix it."),
        said("assistant", "", "Two files.", _CALLS[:1]),
        result(1, "x = 1"),
        said("assistant", "Done.", "It is fixed."),
        said("user", "And now?"),
        said("assistant", None, "One more.", _CALLS[1:2]),
        result(2, ""),
    ],
}
