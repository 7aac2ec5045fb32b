"""Conversations -> texts of prompts: the chat template, or the model's published encoding."""

import inspect
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from jinja2 import TemplateError

from dcpmla.serving.chat.encodings import find_encoding
from dcpmla.serving.chat.values import arguments_of
from dcpmla.serving.control_tokens import ControlTokens
from dcpmla.serving.conversation import Conversation
from dcpmla.serving.errors import ApiError, wrong
from dcpmla.serving.messages import Started
from dcpmla.serving.shown import Json

_PROBE = '{"probe":[1,2]}'  # arguments of a call
_SWITCHES = ("thinking", "enable_thinking")  # variables of templates that turn the reasoning on and off


class Template:
    """The text of a model's conversations.

    Args:
        tokenizer: Tokenizer of transformers; None without one.
        given: Template in place of the tokenizer's, None for that.

    Attributes:
        text: All of the template; empty without one.
    """

    def __init__(self, model: Started, tokenizer: Any, given: str | None) -> None:
        self._tokenizer, self._given = tokenizer, given
        own = given or getattr(tokenizer, "chat_template", None) or ""
        self.text = own if isinstance(own, str) else "".join(own.values())  # Some have several, by name.
        self._words = set(re.findall(r"\w+", self.text))
        encodings = (find_encoding(name, model.encoder) for name in (model.model_type, model.text_type))
        self._encoding = None if self.text else next(filter(None, encodings), None)

    def check(self, conversation: Conversation, tokenizer: Any) -> None:
        """Raise ApiError if the prompt would not show what the client gives."""
        tools = conversation.tool_use.tools
        if self._encoding is not None:
            return
        if not self.text:
            words = "the model's tokenizer has no chat template; use /v1/completions"
            raise ApiError(400, words, param="messages")
        # They are variables of the template, not arguments of the function that renders it.
        arguments = inspect.signature(tokenizer.apply_chat_template).parameters
        if reserved := {*conversation.variables, *conversation.defaults} & arguments.keys():
            raise ApiError(400, f"{min(reserved)} is no variable of a chat template", param="chat_template_kwargs")
        if tools and "tools" not in self._words:
            raise wrong("tools", "are not supported by the model's chat template")
        if conversation.num_calls and "tool_calls" not in self._words:
            raise ApiError(400, "tool_calls are not supported by the model's chat template", param="messages")
        name = conversation.reasoning_field
        if name and conversation.thinking and not self._words & {"reasoning_effort", *_SWITCHES}:
            raise wrong(name, "is not supported by the model's chat template; leave it out")

    def render(self, conversation: Conversation) -> str:
        """Return the text of a conversation, in which texts of users and tools are cut (`ControlTokens.cut`)."""
        messages = self._control_tokens.cut(conversation.messages)
        variables: Json = {**conversation.defaults}
        if conversation.thinking is not None:
            variables |= dict.fromkeys(_SWITCHES, conversation.thinking)
        if conversation.effort is not None:
            variables["reasoning_effort"] = conversation.effort
        variables |= conversation.variables
        arguments = {
            "add_generation_prompt": conversation.add_generation_prompt,
            "continue_final_message": conversation.continue_final_message,
        }
        if self._encoding is not None:
            effort = variables.get("reasoning_effort")
            switches = [variables[name] for name in _SWITCHES if variables.get(name) is not None]
            return self._encoding.render(
                messages,
                conversation.tool_use.listed or None,
                thinking=effort != "none" and (any(switches) if switches else self._encoding.thinks_by_default),
                reasoning_effort=None if effort == "none" else effort,
                **arguments,
            )
        if conversation.num_calls and not self._takes_texts:
            messages = [*map(_with_objects, messages)]
        if "developer" not in self._words:  # Most templates ignore messages of roles that they do not know.
            messages = [{**each, "role": "system"} if each["role"] == "developer" else each for each in messages]
        tools = conversation.tool_use.listed or None
        try:
            return self._apply(messages, tools, **arguments, **variables)
        except TemplateError:  # Some templates want users and answers to alternate, and agents do not.
            alternating = _alternating(messages)
            if alternating == messages:
                raise
            return self._apply(alternating, tools, **arguments, **variables)

    def compile(self) -> None:
        """Compile the template, so that forks of this process find it compiled."""
        if self._tokenizer is not None and self.text:
            _ = self._control_tokens, self._takes_texts

    @cached_property
    def _control_tokens(self) -> ControlTokens:
        return ControlTokens(self._tokenizer)

    @cached_property
    def _takes_texts(self) -> bool:
        """Return whether the template writes arguments of calls as they are if they are texts.

        Others read objects: they write each value, or JSON of their own.
        """
        call = {"type": "function", "id": "call00000", "function": {"name": "probe", "arguments": _PROBE}}
        messages: list[Json] = [
            {"role": "user", "content": "probe"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "probe", "tool_call_id": "call00000"},
        ]
        try:
            return _PROBE in self._apply(messages, None, add_generation_prompt=True)
        except Exception:  # whatever a template runs into with a text
            return False

    def _apply(self, messages: Sequence[Json], tools: list[Json] | None, **arguments: Any) -> str:
        """Return what the template writes."""
        text: str = self._tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=self._given, tokenize=False, **arguments
        )
        return text


def _with_objects(message: Json) -> Json:
    """Return a message whose calls have their arguments as objects."""
    if "tool_calls" not in message:
        return message
    calls = message["tool_calls"]
    return {
        **message,
        "tool_calls": [{**each, "function": {**each["function"], "arguments": arguments_of(each)}} for each in calls],
    }


def _alternating(messages: Sequence[Json]) -> list[Json]:
    """Return messages in which users and answers alternate after one message of a system.

    Later messages of a system become a user's. A user's message joins the message before it if that is a user's or a
    tool's result, and the first ones of a system are one.
    """
    joined: list[Json] = []
    for message in messages:
        before = joined[-1]["role"] if joined else "system"
        role = "user" if message["role"] == "system" and before != "system" else message["role"]
        if joined and role in ("system", "user") and before in (role, "tool"):
            joined[-1] = {**joined[-1], "content": f"{joined[-1]['content']}\n\n{message['content']}"}
        else:
            joined.append({**message, "role": role})
    return joined
