"""The published encoding of Kimi-K3, whose checkpoint has no chat template.

Source: `encoding_k3.py` of the checkpoint.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dcpmla.serving.chat.encoding import Calls, Encoding, Message, reasoning_of, text_of
from dcpmla.serving.chat.formats import FORMATS
from dcpmla.serving.chat.markup import escaped

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


class _KimiK3(Encoding):
    """The encoding of Kimi-K3: elements of messages, channels, calls and arguments.

    Every answer keeps its reasoning. Results follow the order of their calls.
    """

    def _merged(
        self, group: Sequence[tuple[int, Message]], before: Sequence[Message], calls: Calls
    ) -> list[dict[str, Any]]:
        """Return results in the order of their calls, numbered from 1 after each answer."""
        last: Message = next((each for each in reversed(before) if each["role"] in ("assistant", "tool")), {})
        if last.get("role") == "assistant" and not last.get("tool_calls"):
            calls = {}
        results: list[tuple[int, int, str]] = []
        for place, (number, message) in enumerate(group):
            if message.get("tool_call_id") not in calls:
                words = f"result {number} has no call {message.get('tool_call_id')!r} before it"
                raise ValueError(f"messages: {words}")
            order, name = calls[message["tool_call_id"]]
            results.append((order, place, name))
        numbered = enumerate(sorted(results), last.get("index", 0) + 1)
        return [{**group[place][1], "tool": name, "index": index} for index, (_, place, name) in numbered]

    def _start(self, messages: Sequence[Message], tools: Sequence[Message] | None, effort: str) -> str:
        text = ""
        if tools:
            schemas = json.dumps(list(tools), ensure_ascii=False, separators=(",", ":"), sort_keys=True)
            text = self._element(_TOOLS.format(schemas), role="system", type="tool-declare")
        return text + (self._element(_EFFORT.format(effort), role="system", type="thinking-effort") if effort else "")

    def _message(self, messages: Sequence[Message], number: int, reasons: bool) -> str:
        message = messages[number]
        role, text = message["role"], text_of(message, "")
        if role == "tool":
            return self._element(text, role=role, tool=message["tool"], index=message["index"])
        attributes = {"role": "system" if role == "developer" else role}
        if message.get("name"):
            attributes["name"] = message["name"]
        return self._element(self._answer(message, reasons) if role == "assistant" else text, **attributes)

    def _opening(self, last: Message | None, thinking: bool) -> str:
        return _open(role="assistant") + (self.calls.reasoning if thinking else self.calls.content)[0]

    def _answer(self, message: Message, reasons: bool) -> str:
        """Return the channels of an assistant's message."""
        reasoning, calls = reasoning_of(message), message.get("tool_calls") or ()
        text = text_of(message, "").join(self.calls.content)
        if reasons:
            text = (reasoning if reasoning.strip() else "").join(self.calls.reasoning) + text
        named = ((escaped(call["function"]["name"]), _arguments(call["function"].get("arguments"))) for call in calls)
        return text + (self.calls.written_calls(named) if calls else "")

    def _element(self, text: str, /, **attributes: object) -> str:
        """Return a message."""
        return _open(**attributes) + text + "".join(self.calls.ends)


def _arguments(arguments: Any) -> str | Mapping[str, Any]:
    """Return a call's arguments; for a text that is no JSON, an element with the text."""
    if isinstance(arguments, str) and arguments.strip():
        try:
            values = json.loads(arguments)
        except (ValueError, RecursionError):
            return f'<|open|>json type="object"<|sep|>{arguments}<|close|>json<|sep|>'
    else:
        values = arguments or {}
    if not isinstance(values, Mapping):
        raise ValueError(f"messages: arguments {arguments!r} are no JSON object")
    return values


def _open(**attributes: object) -> str:
    """Return the text before a message."""
    texts = (f' {key}="{escaped(str(value))}"' for key, value in attributes.items())
    return f"<|open|>message{''.join(texts)}<|sep|>"


_FORMAT = FORMATS["kimi_k3"]
KIMI_K3 = _KimiK3(calls=_FORMAT, ends=(_FORMAT.content[1], _FORMAT.ends[0]), efforts=_EFFORTS)
