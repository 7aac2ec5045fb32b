"""Chats of one model: conversations -> prompts, and readers of its answers."""

import asyncio
import inspect
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from dcpmla.serving.answer_grammars import AnswerGrammars
from dcpmla.serving.chat.encodings import find_encoding
from dcpmla.serving.chat.events import AnswerParser
from dcpmla.serving.chat.formats import FORMATS, AnswerFormat, find_format
from dcpmla.serving.chat.writing import WRITINGS
from dcpmla.serving.conversation import Conversation
from dcpmla.serving.errors import ApiError
from dcpmla.serving.messages import Started
from dcpmla.serving.prompts import Prompt, Texts
from dcpmla.serving.reader import AnswerReader, ChainedParser, HiddenTokens, PlainParser
from dcpmla.serving.shown import Json
from dcpmla.serving.structured import GrammarChecks

_PROBE = '{"probe":[1,2]}'  # arguments of a call
_SWITCHES = ("thinking", "enable_thinking")  # variables of templates that turn the reasoning on and off


class Chats:
    """The form of a model's conversations.

    Args:
        checks: Checks of grammars.
        chat_template: Template in place of the tokenizer's, None for that.
        call_parser: Name of the format of tool calls, None for the model's.
        reasoning_parser: Name of the format of reasoning, None for the model's.

    Attributes:
        grammars: Grammars of answers.
    """

    def __init__(
        self,
        model: Started,
        checks: GrammarChecks,
        chat_template: str | None = None,
        call_parser: str | None = None,
        reasoning_parser: str | None = None,
    ) -> None:
        self._texts, self._given_template = Texts(model), chat_template
        own_template = chat_template or getattr(model.tokenizer, "chat_template", None) or ""
        self._template = (
            own_template if isinstance(own_template, str) else "".join(own_template.values())
        )  # Some have several, by name.
        self._words = set(re.findall(r"\w+", self._template))
        types = model.model_type, model.text_type
        encodings = (find_encoding(name, model.encoder) for name in types)
        self._encoding = None if self._template else next(filter(None, encodings), None)
        formats = (find_format(name, self._template or model.encoder) for name in types)
        own = next(filter(None, formats), None)
        self._call_format = own if call_parser is None else FORMATS[call_parser]
        self._reasoning_format = own if reasoning_parser is None else FORMATS[reasoning_parser]
        self.grammars = AnswerGrammars(model, self._call_format, self._reasoning_format, checks)

    @cached_property
    def _hidden(self) -> HiddenTokens:
        added = self._texts.tokenizer.added_tokens_decoder.values()
        return HiddenTokens([token.content for token in added if token.special])

    async def prompt(
        self, conversation: Conversation, add_special_tokens: bool = False, num_kept: int | None = None
    ) -> Prompt:
        """Return a conversation as the chat template, or the model's published encoding, writes it.

        Args:
            add_special_tokens: Whether the tokenizer adds its special tokens to the template's.
            num_kept: Number of its last tokens to keep, None for all.
        Raises:
            ApiError: No template, a template that refuses the messages, a conversation that is too long.
        """
        self._check(conversation)
        try:
            text = await asyncio.to_thread(self._render, conversation)
        except Exception as error:  # whatever a template runs into with this client's messages
            raise ApiError(400, f"the chat template refuses the messages: {error}", param="messages") from error
        prompt = await self._texts.encoded(text, add_special_tokens, num_kept)
        in_reasoning = self._opens_reasoning(text, conversation.continue_final_message)
        may_reason = not in_reasoning and self._may_reason(text, conversation)
        return replace(prompt, in_reasoning=in_reasoning, may_reason=may_reason)

    def reader(self, conversation: Conversation, prompt: Prompt, skip_special_tokens: bool) -> AnswerReader:
        """Return the reader of an answer to a prompt.

        Args:
            skip_special_tokens: Whether special tokens that are no markup of the format are left out of the text.
        """
        hidden = self._hidden if skip_special_tokens and self.has_format else HiddenTokens([])
        counts = self._reasoning_format is not None
        return AnswerReader(
            self._parser(conversation, prompt),
            hidden,
            self._texts.offsets(prompt, 0, skip_special_tokens=False) if counts else None,
            in_reasoning=prompt.in_reasoning,
            is_parallel=conversation.tool_use.is_parallel,
        )

    @property
    def has_format(self) -> bool:
        """Return whether answers are parsed, and so need their special tokens."""
        return self._call_format is not None or self._reasoning_format is not None

    def _check(self, conversation: Conversation) -> None:
        """Raise ApiError if the prompt would not show what the client gives, or the answer could not be read."""
        tools, apply = conversation.tool_use.tools, self._texts.tokenizer.apply_chat_template
        if tools and self._call_format is None:
            raise ApiError(400, "tools need --tool-call-parser: the model's format is unknown", param="tools")
        if self._encoding is not None:
            return
        if not self._template:
            words = "the model's tokenizer has no chat template; use /v1/completions"
            raise ApiError(400, words, param="messages")
        # They are variables of the template, not arguments of the function that renders it.
        if reserved := conversation.variables.keys() & inspect.signature(apply).parameters.keys():
            raise ApiError(400, f"{min(reserved)} is no variable of a chat template", param="chat_template_kwargs")
        if tools and "tools" not in self._words:
            raise ApiError(400, "tools are not supported by the model's chat template", param="tools")
        if conversation.num_calls and "tool_calls" not in self._words:
            raise ApiError(400, "tool_calls are not supported by the model's chat template", param="messages")
        name = conversation.reasoning_field
        if name and conversation.thinking and not self._words & {"reasoning_effort", *_SWITCHES}:
            raise ApiError(400, f"{name} is not supported by the model's chat template; leave it out", param=name)

    def _render(self, conversation: Conversation) -> str:
        """Return the text of a conversation."""
        variables: Json = {}
        if conversation.thinking is not None:
            variables = dict.fromkeys(_SWITCHES, conversation.thinking)
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
                conversation.messages,
                conversation.tool_use.tools or None,
                thinking=effort != "none" and (any(switches) if switches else self._encoding.thinks_by_default),
                reasoning_effort=None if effort == "none" else effort,
                **arguments,
            )
        messages = conversation.messages
        if conversation.num_calls and not self._takes_texts:
            messages = _with_objects(messages)
        if "developer" not in self._words:  # Most templates ignore messages of roles that they do not know.
            messages = [{**each, "role": "system"} if each["role"] == "developer" else each for each in messages]
        return self._apply(messages, list(conversation.tool_use.tools) or None, **arguments, **variables)

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
        text: str = self._texts.tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=self._given_template, tokenize=False, **arguments
        )
        return text

    def _opens_reasoning(self, text: str, is_continued: bool) -> bool:
        """Return whether a prompt opens the reasoning: at its end, or somewhere in a message that is continued."""
        if self._reasoning_format is None:
            return False
        start, end = self._reasoning_format.markup.reasoning
        return text.rfind(start) > text.rfind(end) if is_continued else text.rstrip().endswith(start)

    def _may_reason(self, text: str, conversation: Conversation) -> bool:
        """Return whether the answer to a prompt that opens no reasoning may open one itself."""
        if self._reasoning_format is None or conversation.thinking is False or conversation.continue_final_message:
            return False
        closed = self._reasoning_format.markup.reasoning[1], WRITINGS[self._reasoning_format.name].content_start
        return not text.rstrip().endswith(tuple(filter(None, closed)))

    def _parser(self, conversation: Conversation, prompt: Prompt) -> AnswerParser:
        """Return the parser of an answer to a prompt."""
        tools, num_calls = conversation.tool_use.tools, conversation.num_calls
        calls, reasoning = self._call_format, self._reasoning_format

        def parser(chosen: AnswerFormat, parses_calls: bool, parses_reasoning: bool) -> AnswerParser:
            return chosen.parser(
                tools,
                in_reasoning=prompt.in_reasoning and parses_reasoning,
                parses_calls=parses_calls,
                parses_reasoning=parses_reasoning,
                first_call=num_calls,
            )

        if calls is None:
            return PlainParser() if reasoning is None else parser(reasoning, False, True)
        if reasoning is None or calls is reasoning:
            return parser(calls, bool(tools), reasoning is not None)
        return ChainedParser(parser(reasoning, False, True), parser(calls, bool(tools), False))


def _with_objects(messages: Sequence[Json]) -> list[Json]:
    """Return messages whose calls have their arguments as objects; text that is none becomes an argument of its own."""

    def converted(call: Json) -> Json:
        text = call["function"]["arguments"]
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            values = None
        arguments = values if isinstance(values, dict) else {"arguments": text}
        return {**call, "function": {**call["function"], "arguments": arguments}}

    return [
        {**each, "tool_calls": [*map(converted, each["tool_calls"])]} if "tool_calls" in each else each
        for each in messages
    ]
