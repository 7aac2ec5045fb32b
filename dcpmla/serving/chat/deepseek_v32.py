"""The published encoding of DeepSeek V3.2, whose checkpoint has no chat template.

Source: `encoding/encoding_dsv32.py` of the checkpoint, and its examples.
"""

from collections.abc import Sequence

from dcpmla.serving.chat.dsml import (
    ASSISTANT,
    BOS,
    END_THINK,
    THINK,
    USER,
    Message,
    check_last,
    prepare,
    render_answer,
    schemas_of,
    text_of,
)

_ROLES = ("system", "developer", "user", "assistant", "tool")
_TOOLS = """## Tools

You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<｜DSML｜function_calls>" block like the following as part of your reply \
to the user:
<｜DSML｜function_calls>
<｜DSML｜invoke name="$FUNCTION_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$FUNCTION_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜function_calls>

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


class DeepseekV32:
    """The encoding of DeepSeek V3.2.

    The text that opens an answer follows a user's message and a group of results, unless another user's or developer's
    message comes before the answer. Reasoning before the last user's message is dropped.
    """

    thinks_by_default = False

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

        Args:
            reasoning_effort: Ignored, since V3.2 has no such levels.
        Raises:
            ValueError: An unknown role, a result without its call, a call without its result, or a last message that
                cannot be continued.
        """
        conversation = prepare(messages, tools, _ROLES)
        last_user = _last_user(conversation)
        if continue_final_message:
            check_last(conversation)
        pieces = [
            self._render(conversation, number, thinking and number >= last_user, continue_final_message)
            for number in range(len(conversation))
        ]
        opens = add_generation_prompt and not continue_final_message
        return BOS + "".join(pieces) + _generation_prompt(conversation, thinking, opens)

    def _render(self, messages: Sequence[Message], number: int, thinking: bool, continues: bool) -> str:
        """Return a message's text.

        Args:
            thinking: Whether the model reasons in the answer that the message opens, or that it is.
            continues: Whether the last message goes on.
        """
        message = messages[number]
        text, is_last = text_of(message), number == len(messages) - 1
        role, shown_tools = message["role"], message.get("tools")
        described = f"\n\n{_TOOLS.format(schemas=schemas_of(shown_tools))}" if shown_tools else ""
        answers = not is_last and messages[number + 1]["role"] == "assistant"
        mark = (THINK if thinking else END_THINK) if answers else ""
        opening = ASSISTANT + mark if answers else ""
        if role == "system":
            return text + described
        if role == "developer":
            return f"{USER}{described}\n\n# The user's message is: {text}{opening}"
        if role == "user":
            return USER + text + opening
        if role == "tool":
            return _render_result(messages, number, mark)
        return render_answer(message, "function_calls", reasons=thinking, goes_on=is_last and continues)


def _last_user(messages: Sequence[Message]) -> int:
    users = [number for number, message in enumerate(messages) if message["role"] in ("user", "developer")]
    return users[-1] if users else -1


def _render_result(messages: Sequence[Message], number: int, mark: str) -> str:
    """Return the text of a result of a call, with what begins and ends the group of results.

    Args:
        mark: Text that opens or closes the reasoning after the group.
    """
    first = number
    while first and messages[first - 1]["role"] == "tool":
        first -= 1
    calls = messages[first - 1].get("tool_calls") or () if first else ()
    order, num_calls = number - first + 1, len(calls)
    ends = number + 1 == len(messages) or messages[number + 1]["role"] != "tool"
    if order > num_calls or (ends and order < num_calls):
        raise ValueError(f"messages: {num_calls} calls before message {first}, and another number of results")
    start = "\n\n<function_results>" if order == 1 else ""
    return f"{start}\n<result>{text_of(messages[number])}</result>" + (
        f"\n</function_results>\n\n{mark}" if ends else ""
    )


def _generation_prompt(messages: Sequence[Message], thinking: bool, is_added: bool) -> str:
    """Return the text that opens the next answer; after results only the reasoning is opened."""
    if not is_added or not messages:
        return ""
    mark = THINK if thinking else END_THINK
    return mark if messages[-1]["role"] == "tool" else ASSISTANT + mark
