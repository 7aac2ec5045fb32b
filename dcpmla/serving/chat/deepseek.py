"""The published encodings of DeepSeek V3.2, V4 and V4.1, whose checkpoints have no chat template.

Sources: `encoding/encoding_dsv32.py`, `encoding/encoding_dsv4.py` and its V4.1 successor in the checkpoints, and their
examples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dcpmla.serving.chat.encoding import Calls, Encoding, Message, reasoning_of, text_of
from dcpmla.serving.chat.formats import FORMATS
from dcpmla.serving.chat.values import arguments_of, dumps

_BOS, _EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
_USER, _ASSISTANT, _SYSTEM, _REMINDER = "<｜User｜>", "<｜Assistant｜>", "<｜System｜>", "<｜latest_reminder｜>"
_TOOLS_V32 = """## Tools

You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "{section}" block like the following as part of your reply \
to the user:
{example}

String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should \
use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types \
(numbers, booleans, arrays, objects).

If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. \
Here is an example:

<｜DSML｜function_calls>
...
</｜DSML｜function_calls>

<function_results>
...
</function_results>

<think>...thinking about results</think>

Here are the functions available in JSONSchema format:
<functions>
{schemas}
</functions>
"""
_TOOLS_V4 = """## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"{section}" block like the following:

{example}

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, \
objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> \
BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

{schemas}

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""
_ABSOLUTE = """Reasoning Effort: Absolute maximum with no shortcuts permitted.
You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, \
rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.
Explicitly write out your entire deliberation process, documenting every intermediate step, considered alternative, \
and rejected hypothesis to ensure absolutely no assumption is left unchecked.

"""
_BEYOND = """Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.
You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the \
problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying cause \
rather than any surface symptom.
Do not stop reasoning until you have independently verified the solution from multiple angles and are certain that no \
assumption remains unchecked and no error remains undiscovered.

"""
_BUDGET = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"

# Levels of effort, and the text before the conversation; None is the default.
_EFFORTS_V4: Mapping[str | None, str] = {
    **dict.fromkeys((None, "minimal", "low", "medium", "high"), ""),
    **dict.fromkeys(("xhigh", "max"), _ABSOLUTE),
}
_EFFORTS_V4_0731: Mapping[str | None, str] = {
    **dict.fromkeys(("minimal", "low", "medium"), ""),
    **dict.fromkeys((None, "high", "xhigh"), _ABSOLUTE),
    "max": _BEYOND,
}
_LEVELS_V41 = {None: 50, "minimal": 25, "low": 25, "medium": 50, "high": 50, "xhigh": 75, "max": 100}
_EFFORTS_V41: Mapping[str | None, str] = {
    **{level: _BUDGET.format(budget) for level, budget in _LEVELS_V41.items()},
    **{str(budget): _BUDGET.format(budget) for budget in range(1, 101)},
}


@dataclass(frozen=True, kw_only=True)
class _DeepseekV32(Encoding):
    """The encoding of DeepSeek V3.2.

    Results of calls are a group after their answer. Reasoning before the last user's message is dropped.

    Attributes:
        description: Text that describes the tools, with `{section}`, `{example}` and `{schemas}`.
        function: Word for a function in the example of a call.
    """

    ends: tuple[str, str] = (_EOS, _EOS)
    description: str = _TOOLS_V32
    function: str = "FUNCTION"

    def _arranged(self, messages: list[dict[str, Any]], tools: Sequence[Message] | None) -> list[dict[str, Any]]:
        """Return messages whose first one is a system's and has the request's tools in place of its own."""
        if tools:
            if not messages or messages[0]["role"] != "system":
                messages.insert(0, {"role": "system", "content": ""})
            messages[0]["tools"] = tools
        return super()._arranged(messages, tools)

    def _merged(
        self, group: Sequence[tuple[int, Message]], before: Sequence[Message], calls: Calls
    ) -> list[dict[str, Any]]:
        num_calls, first = len(before[-1].get("tool_calls") or ()) if before else 0, group[0][0]
        if len(group) != num_calls:
            raise ValueError(f"messages: {num_calls} calls before message {first}, and another number of results")
        results = "".join(f"\n<result>{text_of(message)}</result>" for _, message in group)
        return [{"role": "tool", "content": f"\n\n<function_results>{results}\n</function_results>\n\n"}]

    def _first_kept(self, messages: Sequence[Message]) -> int:
        return max((number for number in range(len(messages)) if self._asks(messages, number)), default=0)

    def _asks(self, messages: Sequence[Message], number: int) -> bool:
        """Return whether a message asks for an answer."""
        return messages[number]["role"] in ("user", "developer")

    def _start(self, messages: Sequence[Message], tools: Sequence[Message] | None, effort: str) -> str:
        return _BOS

    def _message(self, messages: Sequence[Message], number: int, reasons: bool) -> str:
        message = messages[number]
        if message["role"] == "assistant":
            return self._answer(message, reasons)
        follows = number + 1 < len(messages) and messages[number + 1]["role"] in ("assistant", "latest_reminder")
        opens = follows and (message["role"] == "tool" or self._asks(messages, number))
        return self._text(messages, number) + (self._opening(message, reasons) if opens else "")

    def _opening(self, last: Message | None, thinking: bool) -> str:
        if last is None:
            return ""
        return ("" if last["role"] == "tool" else _ASSISTANT) + self.calls.reasoning[0 if thinking else 1]

    def _text(self, messages: Sequence[Message], number: int) -> str:
        """Return the text of a message that is not the assistant's."""
        message = messages[number]
        match message["role"]:
            case "system":
                return text_of(message) + self._tools(message)
            case "developer":
                return f"{_USER}{self._tools(message)}\n\n# The user's message is: {text_of(message)}"
            case "tool":
                return text_of(message)
        return _USER + text_of(message)

    def _tools(self, message: Message) -> str:
        """Return the description of a message's tools."""
        tags, name = self.calls.tags, f"${self.function}_NAME"
        if tags is None or not message.get("tools"):
            return ""
        middle = tags.middle.replace("{type}", "true|false")
        argument = f"{tags.start}$PARAMETER_NAME{middle}$PARAMETER_VALUE{tags.end}"
        example = self.calls.written_calls([(name, f"{argument}\n..."), (f"{name}2", "\n...")]).strip()
        schemas = "\n".join(dumps(tool["function"]) for tool in message["tools"])
        section = self.calls.bare.section[0]
        return "\n\n" + self.description.format(section=section, example=example, schemas=schemas)

    def _answer(self, message: Message, reasons: bool) -> str:
        """Return the text of an assistant's message, whose reasoning may be empty."""
        text, calls = text_of(message), message.get("tool_calls")
        if reasons:
            text = reasoning_of(message) + self.calls.reasoning[1] + text
        if calls:  # A call without arguments has an empty line.
            text += self.calls.written_calls((call["function"]["name"], arguments_of(call) or "\n") for call in calls)
        return text + _EOS


@dataclass(frozen=True, kw_only=True)
class _DeepseekV4(_DeepseekV32):
    """The encoding of DeepSeek V4, or of V4.1, which marks systems' messages.

    Results of calls are parts of user's messages. With tools, all reasoning is kept. The published encoders drop
    developers' messages where they drop reasoning; here they are kept, since clients have instructions there.
    """

    roles: Sequence[str] = ("system", "developer", "user", "assistant", "tool", "latest_reminder")
    together: Sequence[str] = ("user", "tool")
    description: str = _TOOLS_V4
    function: str = "TOOL"

    def _merged(
        self, group: Sequence[tuple[int, Message]], before: Sequence[Message], calls: Calls
    ) -> list[dict[str, Any]]:
        """Return one user's message, with results in the order of their calls."""
        found = [message for _, message in group if message["role"] == "tool"]
        results = iter(sorted(found, key=lambda each: calls.get(each.get("tool_call_id") or "", (0, ""))[0]))
        texts = (
            f"<tool_result>{text_of(next(results))}</tool_result>" if message["role"] == "tool" else text_of(message)
            for _, message in group
        )
        return [{"role": "user", "content": "\n\n".join(texts)}]

    def _first_kept(self, messages: Sequence[Message]) -> int:
        return 0 if any(message.get("tools") for message in messages) else super()._first_kept(messages)

    def _asks(self, messages: Sequence[Message], number: int) -> bool:
        is_marked = self.marks_systems and number > 0 and messages[number]["role"] == "system"
        return is_marked or super()._asks(messages, number)

    def _start(self, messages: Sequence[Message], tools: Sequence[Message] | None, effort: str) -> str:
        if not messages:
            return _BOS
        is_marked = self.marks_systems and (effort or messages[0]["role"] == "system")
        return _BOS + (_SYSTEM if is_marked else "") + effort

    def _text(self, messages: Sequence[Message], number: int) -> str:
        message, later = messages[number], _SYSTEM if self.marks_systems and number else ""
        mark = {"system": later, "latest_reminder": _REMINDER}.get(message["role"], _USER)
        return mark + text_of(message) + self._tools(message)


DEEPSEEK_V32 = _DeepseekV32(calls=FORMATS["deepseek_v32"], thinks_by_default=False)
DEEPSEEK_V4 = _DeepseekV4(calls=FORMATS["deepseek_v4"], efforts=_EFFORTS_V4)
DEEPSEEK_V4_0731 = _DeepseekV4(calls=FORMATS["deepseek_v4"], efforts=_EFFORTS_V4_0731)
DEEPSEEK_V41 = _DeepseekV4(calls=FORMATS["deepseek_v41"], efforts=_EFFORTS_V41, marks_systems=True)
