"""Chats of one model: conversations -> prompts, and readers of its answers."""

from array import array
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from dcpmla.serving.answer_grammars import AnswerGrammars
from dcpmla.serving.background import Background, Prepared, prepare
from dcpmla.serving.chat.formats import FORMATS, find_format
from dcpmla.serving.chat.parser import MarkupParser
from dcpmla.serving.control_tokens import CUT
from dcpmla.serving.conversation import Conversation
from dcpmla.serving.errors import ApiError
from dcpmla.serving.prompts import Prompt, Texts
from dcpmla.serving.reader import AnswerReader, HiddenTokens
from dcpmla.serving.structured import GrammarChecks
from dcpmla.serving.worker import Allowance, LimitError, Worker

_RENDERED = 1 << 24  # characters a second of a slow template; common ones are faster
_NONE: Mapping[str, Any] = {}
_SMALL_NUMBER = 64  # messages whose number does not matter


class Chats:
    """The form of a model's conversations.

    Args:
        chat_template: Template in place of the tokenizer's, None for that.
        call_parser: Name of the format of tool calls, None for the model's.
        reasoning_parser: Name of the format of reasoning, None for the model's.
        variables: Variables of the template, where a conversation does not give them.
        background: What renders and tokenizes prompts; None for one of its own.
        checks: Checks of grammars; by default the background's worker makes them.

    Attributes:
        grammars: Grammars of answers.
    """

    def __init__(
        self,
        prepared: Prepared,
        chat_template: str | None = None,
        call_parser: str | None = None,
        reasoning_parser: str | None = None,
        variables: Mapping[str, Any] = _NONE,
        background: Background | None = None,
        checks: GrammarChecks | None = None,
    ) -> None:
        background, model = background or Background(prepared, Worker(prepare)), prepared.model
        self._variables = variables
        self._background, self._texts, self._given_template = background, Texts(background), chat_template
        self._template = prepared.template(chat_template)
        types = model.model_type, model.text_type
        formats = (find_format(name, self._template.text or model.encoder) for name in types)
        own = next(filter(None, formats), None)
        self._call_format = own if call_parser is None else FORMATS[call_parser]
        self._reasoning_format = own if reasoning_parser is None else FORMATS[reasoning_parser]
        self.grammars = AnswerGrammars(
            prepared, self._call_format, self._reasoning_format, checks or GrammarChecks(background.worker)
        )

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
        pieces = await self._pieces(conversation, add_special_tokens)
        prompt, text = await self._texts.encoded(pieces, add_special_tokens, num_kept), "".join(pieces)
        in_reasoning = self._opens_reasoning(text, conversation.continue_final_message)
        may_reason = not in_reasoning and self._may_reason(text, conversation)
        return replace(prompt, in_reasoning=in_reasoning, may_reason=may_reason)

    async def tokens(self, conversation: Conversation, add_special_tokens: bool = False) -> "array[int]":
        """Return the tokens of the prompt that `prompt` makes, also of one that is too long for the model.

        Raises:
            ApiError: No template, or a template that refuses the messages.
        """
        return await self._texts.encode(await self._pieces(conversation, add_special_tokens), add_special_tokens)

    async def _pieces(self, conversation: Conversation, add_special_tokens: bool) -> list[str]:
        """Return a conversation's text in pieces, which have no token in common: at cuts and, unless special tokens
        are added to a piece, at borders.
        """
        if conversation.tool_use.tools and self._call_format is None:
            raise ApiError(400, "tools need --tool-call-parser: the model's format is unknown", param="tools")
        conversation = replace(conversation, defaults=self._variables)
        self._template.check(conversation, self._texts.tokenizer)
        return await self._rendered(conversation, not add_special_tokens)

    async def _rendered(self, conversation: Conversation, has_borders: bool) -> list[str]:
        """Return the pieces of a conversation's text.

        Templates that join texts message by message take a time that grows with the product of both.
        """
        size = conversation.num_characters
        work = size * max(1, len(conversation.messages) // _SMALL_NUMBER)
        allowance = Allowance(cpu_seconds=0.5 + size / _RENDERED, answer_bytes=16 * size + (1 << 20))
        try:
            args = self._given_template, conversation, has_borders
            pieces, fault = await self._background.run(work, allowance, _render, *args)
        except LimitError as error:
            raise ApiError(400, f"messages: {error} in the chat template", param="messages") from error
        if fault:
            raise ApiError(400, f"the chat template refuses the messages: {fault}", param="messages")
        return list(pieces)

    def reader(self, conversation: Conversation, prompt: Prompt, skip_special_tokens: bool) -> AnswerReader:
        """Return the reader of an answer to a prompt.

        Args:
            skip_special_tokens: Whether special tokens that are no markup of the format are left out of the text.
        """
        hidden = self._hidden if skip_special_tokens and self.has_format else HiddenTokens([])
        return AnswerReader(
            self._parsers(conversation, prompt),
            hidden,
            counts_reasoning=self._reasoning_format is not None,
            in_reasoning=prompt.in_reasoning,
            is_parallel=conversation.tool_use.is_parallel,
        )

    @property
    def has_format(self) -> bool:
        """Return whether answers are parsed, and so need their special tokens."""
        return self._call_format is not None or self._reasoning_format is not None

    def _opens_reasoning(self, text: str, is_continued: bool) -> bool:
        """Return whether a prompt opens the reasoning: at its end, or somewhere in a message that is continued."""
        if self._reasoning_format is None:
            return False
        start, end = self._reasoning_format.reasoning
        return text.rfind(start) > text.rfind(end) if is_continued else text.rstrip().endswith(start)

    def _may_reason(self, text: str, conversation: Conversation) -> bool:
        """Return whether the answer to a prompt that opens no reasoning may open one itself."""
        if self._reasoning_format is None or conversation.thinking is False or conversation.continue_final_message:
            return False
        closed = self._reasoning_format.reasoning[1], self._reasoning_format.content[0]
        return not text.rstrip().endswith(tuple(filter(None, closed)))

    def _parsers(self, conversation: Conversation, prompt: Prompt) -> list[MarkupParser]:
        """Return the parsers of an answer to a prompt: of its reasoning, then of its calls, or one of both."""
        calls, reasoning, tools = self._call_format, self._reasoning_format, conversation.tool_use.tools
        return [
            MarkupParser(
                each,
                tools,
                in_reasoning=prompt.in_reasoning,
                parses_calls=bool(tools) and each is calls,
                parses_reasoning=each is reasoning,
                first_call=conversation.num_calls,
            )
            for each in ((calls,) if calls is reasoning else (reasoning, calls))
            if each is not None
        ]


def _render(
    prepared: Prepared, given: str | None, conversation: Conversation, has_borders: bool
) -> tuple[list[str], str]:
    """Return the pieces of a conversation's text, and the fault that its template finds in it."""
    try:
        text = prepared.template(given).render(conversation)
        text.encode()  # JSON of arguments may have half of a surrogate pair, which no tokenizer takes.
    except Exception as error:  # whatever a template runs into with this client's messages
        return [], str(error) or repr(error)
    pieces = text.split(CUT)
    return [part for piece in pieces for part in prepared.borders.split(piece)] if has_borders else pieces, ""
