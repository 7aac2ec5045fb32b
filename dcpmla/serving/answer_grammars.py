"""Grammars of chats' answers: required calls, strict tools and structured output, after the reasoning."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace

from dcpmla.runtime.grammar import Grammar
from dcpmla.serving.background import Prepared
from dcpmla.serving.call_grammar import EMPTY, GrammarWriter, UnwrittenSchema, as_regex, either, sequence, write_call
from dcpmla.serving.chat.markup import AnswerFormat
from dcpmla.serving.errors import ApiError
from dcpmla.serving.prompts import Prompt
from dcpmla.serving.shown import Json
from dcpmla.serving.structured import GrammarChecks, check_support
from dcpmla.serving.tools import ToolUse, by_path

_CONTENTS = ("json_object", "json_schema", "choice")  # kinds of grammars that calls or reasoning may come before
# A schema may have keywords of other types.
_FAULTS = (TypeError, ValueError, AttributeError, RecursionError, ApiError)


class AnswerGrammars:
    """The grammars of one model's answers.

    Args:
        calls, reasoning: Formats of calls and of reasoning, None if they are unknown.
    """

    def __init__(
        self, prepared: Prepared, calls: AnswerFormat | None, reasoning: AnswerFormat | None, checks: GrammarChecks
    ) -> None:
        self._model, self._tokenizer = prepared.model, prepared.tokenizer
        self._checks, self._format, self._reasoning = checks, calls, reasoning
        added = {} if self._tokenizer is None else self._tokenizer.added_tokens_decoder
        self._added = {token.content for token in added.values()}
        # For llguidance, tokens in angle brackets are special, too. Other added tokens are text to a grammar.
        self._special_tokens = {
            token.content: number
            for number, token in added.items()
            if token.special or (token.content[:1] == "<" and token.content[-1:] == ">")
        }

    async def grammar(self, use: ToolUse, prompt: Prompt, asked: Grammar | None, source: str) -> Grammar | None:
        """Return the grammar of an answer, None for any text.

        A grammar of the client's own, or a regular expression, holds for the whole answer: it cannot call tools.

        Args:
            asked: Grammar that the client asks for; required calls need not follow it.
            source: Path of the field that has it.
        Raises:
            ApiError: It cannot be served; the message has the path of the part of a schema that is at fault.
        """
        grammar = None if use.required else asked
        await self._checks.check(grammar, source, self._model)
        if grammar is None:
            grammar = await self._composed(use, prompt, None) if use.needs_grammar else None
        elif grammar.kind in _CONTENTS and (use.needs_grammar or use.tools or self._may_reason(prompt)):
            grammar = await self._composed(use, prompt, grammar)
        if grammar is None or not prompt.in_reasoning or self._reasoning is None:
            return grammar
        end = self._reasoning.reasoning[1] + self._reasoning.content[0]
        tokens = self._tokenizer.encode(end, add_special_tokens=False)
        return replace(grammar, starts_after=tuple(tokens))

    async def _composed(self, use: ToolUse, prompt: Prompt, content: Grammar | None) -> Grammar:
        """Return the grammar of reasoning that the model may open, and then calls, or content."""
        field = "tools" if use.tools and self._format is not None else "response_format"
        check_support(field, self._model)
        try:
            grammar = await asyncio.to_thread(self._answer, use, self._may_reason(prompt), content)
            await self._checks.check(grammar, field, self._model)
        except _FAULTS as error:
            await self._find_fault(use)
            if isinstance(error, ApiError):
                raise
            raise ApiError(400, f"{field}: {error}", param=field) from error
        return grammar

    def _answer(self, use: ToolUse, may_reason: bool, content: Grammar | None) -> Grammar:
        """Return what `_composed` does, unchecked."""
        writer, markup, reasoning = GrammarWriter(self._special_tokens), self._format, ""
        if self._reasoning is not None and may_reason:
            start, end = self._reasoning.reasoning
            reasoning = either([sequence(writer.literal(start), writer.text(end)), EMPTY])
        content_end = "" if markup is None else writer.literal(markup.content[1] + markup.ends[0])
        end = either([content_end, EMPTY]) if content_end else ""
        if markup is None or not use.tools:
            plain = writer.text() if content is None else _content(writer, content)
            return writer.grammar(sequence(reasoning, either([sequence(plain, end)])))
        opening = markup.call[0] + markup.before_name
        begins = markup.content[1] + markup.section[0] + opening
        is_free = not use.required and content is None
        begun = begins.lstrip("\n")  # Content may end in any way.
        first = writer.text(begun) if is_free else writer.literal(begins)
        calls = either(self._call(writer, function, use) for _, function in _functions(use))
        between = writer.literal(markup.between + opening)
        repeated = writer.repeated(calls, between, None if use.is_parallel else 1)
        options = [sequence(first, repeated, writer.literal(markup.section[1] + markup.ends[0]))]
        if is_free:
            options.append(sequence(writer.text(excludes=[f"(?s:.*){as_regex(begun)}(?s:.*)"]), end))
        elif content is not None:
            options.append(sequence(_content(writer, content), end))
        return writer.grammar(sequence(reasoning, either(options)))

    def _call(self, writer: GrammarWriter, function: Json, use: ToolUse) -> str:
        """Return the expression of a function's call."""
        assert self._format is not None
        return write_call(writer, self._format, function, is_free=not use.follows_schema(function["name"]))

    async def _find_fault(self, use: ToolUse) -> None:
        """Raise ApiError with the path of a function's schema if it alone cannot be served."""
        for path, function in _functions(use) if self._format is not None else ():
            if not use.follows_schema(function["name"]):
                continue
            try:
                writer = GrammarWriter(self._special_tokens)
                alone = writer.grammar(self._call(writer, function, use))
                await self._checks.check(alone, path, self._model)
            except UnwrittenSchema as error:
                path = ".".join([path, *error.path])
                raise ApiError(400, f"{path}: {error}", param=path) from error
            except _FAULTS as error:
                schema = Grammar("json_schema", json.dumps(function.get("parameters", {})))
                await self._checks.check(schema, path, self._model)  # Its fault has a longer path.
                raise error if isinstance(error, ApiError) else ApiError(400, f"{path}: {error}", param=path) from error

    def _may_reason(self, prompt: Prompt) -> bool:
        """Return whether an answer may open a reasoning: it is a token for models that do."""
        return prompt.may_reason and self._reasoning is not None and self._reasoning.reasoning[0] in self._added


def _functions(use: ToolUse) -> Iterator[tuple[str, Json]]:
    """Yield the functions that may be called, each after the path of its schema."""
    for path, tool in zip(use.paths or by_path(use.tools), use.tools, strict=True):
        if not use.required or tool["function"]["name"] in use.required:
            yield f"{path}.{use.schema_field}", tool["function"]


def _content(writer: GrammarWriter, grammar: Grammar) -> str:
    """Return a grammar of one of `_CONTENTS` as an expression."""
    if grammar.kind == "choice":
        return either(map(writer.literal, json.loads(grammar.text)))
    schema = {"type": "object"} if grammar.kind == "json_object" else json.loads(grammar.text)
    return writer.json(schema if isinstance(schema, dict) else {})
