"""The published encodings of DeepSeek V4 and V4.1, whose checkpoints have no chat template.

Source: `encoding/encoding_dsv4.py` and its V4.1 successor in the checkpoints, and their examples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dcpmla.serving.chat.dsml import (
    ASSISTANT,
    BOS,
    END_THINK,
    REMINDER,
    SYSTEM,
    THINK,
    USER,
    Message,
    check_last,
    prepare,
    render_answer,
    schemas_of,
    text_of,
)

_ROLES = ("system", "developer", "user", "assistant", "tool", "latest_reminder")
_TOOLS = """## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"<{dsml}{section}>" block like the following:

<{dsml}{section}>
<{dsml}invoke name="$TOOL_NAME">
<{dsml}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{dsml}parameter>
...
</{dsml}invoke>
<{dsml}invoke name="$TOOL_NAME2">
...
</{dsml}invoke>
</{dsml}{section}>

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
EFFORTS_V4: Mapping[str | None, str] = {
    **dict.fromkeys((None, "minimal", "low", "medium", "high"), ""),
    **dict.fromkeys(("xhigh", "max"), _ABSOLUTE),
}
EFFORTS_V4_0731: Mapping[str | None, str] = {
    **dict.fromkeys(("minimal", "low", "medium"), ""),
    **dict.fromkeys((None, "high", "xhigh"), _ABSOLUTE),
    "max": _BEYOND,
}
_LEVELS_V41 = {None: 50, "minimal": 25, "low": 25, "medium": 50, "high": 50, "xhigh": 75, "max": 100}
EFFORTS_V41: Mapping[str | None, str] = {
    **{level: _BUDGET.format(budget) for level, budget in _LEVELS_V41.items()},
    **{str(budget): _BUDGET.format(budget) for budget in range(1, 101)},
}


@dataclass(frozen=True)
class DeepseekV4:
    """The encoding of DeepSeek V4 or V4.1.

    Results of calls are parts of user's messages. Without tools, reasoning before the last user's message is dropped.
    The published encoders then drop developers' messages as well, which are kept here: clients have instructions there.

    Attributes:
        section: Name of the element around calls.
        space: Text between the token DSML and the name of an element.
        marks_systems: Whether a system's message has a token, and opens an answer unless it is the first message.
        thinks_by_default: Attribute of `encodings.Encoding`.
    """

    efforts: Mapping[str | None, str] = field(repr=False)
    section: str = "tool_calls"
    space: str = ""
    marks_systems: bool = False
    thinks_by_default: bool = True

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
            ValueError: An unknown role or level of effort, or a last message that cannot be continued.
        """
        if reasoning_effort not in self.efforts:
            names = ", ".join(str(name) for name in self.efforts if name and not name.isdigit())
            raise ValueError(f"reasoning_effort: {reasoning_effort!r} is not in {names}")
        conversation = _merge_results(prepare(messages, tools, _ROLES, marks_systems=self.marks_systems))
        if continue_final_message:
            check_last(conversation)
        keeps_reasoning = any(message.get("tools") for message in conversation)
        last_user = -1 if keeps_reasoning else self._last_user(conversation)
        effort = self.efforts[reasoning_effort] if thinking and conversation else ""
        is_marked = self.marks_systems and conversation and (effort or conversation[0]["role"] == "system")
        pieces = [BOS, SYSTEM if is_marked else "", effort]
        for number in range(len(conversation)):
            reasons = thinking and number >= last_user
            pieces.append(self._render(conversation, number, reasons, continue_final_message))
            if self._opens_answer(conversation, number, add_generation_prompt and not continue_final_message):
                pieces.append(ASSISTANT + (THINK if reasons else END_THINK))
        return "".join(pieces)

    def _last_user(self, messages: Sequence[Message]) -> int:
        """Return the number of the last message that asks for an answer, -1 without one."""
        return max((n for n in range(len(messages)) if self._asks(messages, n)), default=-1)

    def _asks(self, messages: Sequence[Message], number: int) -> bool:
        role = messages[number]["role"]
        return role in ("user", "developer") or (self.marks_systems and role == "system" and number > 0)

    def _opens_answer(self, messages: Sequence[Message], number: int, add_generation_prompt: bool) -> bool:
        """Return whether the text that opens an answer follows a message."""
        if number == len(messages) - 1:
            return add_generation_prompt
        return messages[number + 1]["role"] in ("assistant", "latest_reminder") and self._asks(messages, number)

    def _render(self, messages: Sequence[Message], number: int, reasons: bool, continues: bool) -> str:
        """Return a message's text.

        Args:
            reasons: Whether the message's reasoning, if it is the assistant's, is kept.
            continues: Whether the last message goes on.
        """
        message, is_last = messages[number], number == len(messages) - 1
        role, text = message["role"], text_of(message)
        dsml, shown_tools = f"｜DSML｜{self.space}", message.get("tools")
        if shown_tools:
            text += "\n\n" + _TOOLS.format(dsml=dsml, section=self.section, schemas=schemas_of(shown_tools))
        if role == "system":
            return (SYSTEM if self.marks_systems and number else "") + text
        if role in ("user", "developer"):
            return USER + text
        if role == "latest_reminder":
            return REMINDER + text
        return render_answer(message, self.section, self.space, reasons=reasons, goes_on=is_last and continues)


def _merge_results(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages with neighbouring users' messages and results merged, results in the order of their calls."""
    merged: list[dict[str, Any]] = []
    parts: list[tuple[int, str]] = []  # texts of the last message, with the order of the result's call, else -1
    order: dict[str, int] = {}
    for message in messages:
        if message["role"] not in ("user", "tool"):
            merged.append(dict(message))
            parts = []
            if message.get("tool_calls"):
                order = {call.get("id") or "": number for number, call in enumerate(message["tool_calls"])}
            continue
        if not parts:
            merged.append({"role": "user"})
        text = text_of(message)
        is_result = message["role"] == "tool"
        number = order.get(message.get("tool_call_id") or "", 0) if is_result else -1
        parts.append((number, f"<tool_result>{text}</tool_result>" if is_result else text))
        results = iter(sorted((part for part in parts if part[0] >= 0), key=lambda part: part[0]))
        merged[-1]["content"] = "\n\n".join((part if part[0] < 0 else next(results))[1] for part in parts)
    return merged
