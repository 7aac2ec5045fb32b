"""Grammars of chats' answers: required calls, strict tools and structured output, after the reasoning."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

from dcpmla.runtime.grammar import Grammar
from dcpmla.serving.call_grammar import Either, Part, Parts, Repeat, Schema, Text, as_regex, parts_grammar
from dcpmla.serving.chat.markup import AnswerFormat
from dcpmla.serving.errors import ApiError
from dcpmla.serving.messages import Started
from dcpmla.serving.prompts import Prompt
from dcpmla.serving.structured import GrammarChecks, check_support
from dcpmla.serving.tools import ToolUse
from dcpmla.serving.written_calls import UnwrittenSchema, free_call, written_call


class AnswerGrammars:
    """The grammars of one model's answers.

    Args:
        calls, reasoning: Formats of calls and of reasoning, None if they are unknown.
    """

    def __init__(
        self, model: Started, calls: AnswerFormat | None, reasoning: AnswerFormat | None, checks: GrammarChecks
    ) -> None:
        self._model, self._checks = model, checks
        self._format = calls
        self._reasoning = None if reasoning is None else reasoning.reasoning
        added = {} if model.tokenizer is None else model.tokenizer.added_tokens_decoder
        self._added = {token.content: (number, token.special) for number, token in added.items()}
        self._content_start = "" if reasoning is None else reasoning.content[0]

    async def grammar(self, use: ToolUse, prompt: Prompt, asked: Grammar | None, source: str) -> Grammar | None:
        """Return the grammar of an answer, None for any text.

        A grammar of the client's own, or a regular expression, holds for the whole answer: it cannot call tools.

        Args:
            asked: Grammar that the client asks for; required calls need not follow it.
            source: Path of the field that has it.
        Raises:
            ApiError: It cannot be served; the message has the path of the part of a schema that is at fault.
        """
        content = None if asked is None else _part(asked)
        if asked is not None and not use.required:
            await self._checks.check(asked, source, self._model)
        grammar = None if use.required else asked
        is_own = asked is not None and content is None and not use.required
        if not is_own and (use.needs_grammar or (asked is not None and (use.tools or self._may_reason(prompt)))):
            grammar = await self._composed(use, prompt, content)
        if grammar is None or not prompt.in_reasoning or self._reasoning is None:
            return grammar
        end = self._reasoning[1] + self._content_start
        tokens = self._model.tokenizer.encode(end, add_special_tokens=False)
        return replace(grammar, starts_after=tuple(tokens))

    async def _composed(self, use: ToolUse, prompt: Prompt, content: Part | None) -> Grammar:
        """Return the grammar of reasoning that the model may open, and then calls, or content."""
        needs_calls = bool(use.tools) and self._format is not None
        field = "tools" if needs_calls else "response_format"
        check_support(field, self._model)
        parts: list[Part] = []
        if self._reasoning is not None and self._may_reason(prompt):
            start, end = self._reasoning
            parts.append(Either([[start, Text(end)], []]))
        calls = self._calls(use) if needs_calls else {}
        options = self._options(use, calls, content)
        parts.append(Either(options))
        try:
            grammar = await asyncio.to_thread(parts_grammar, parts, self._special_tokens)
            await self._checks.check(grammar, field, self._model)
        except (TypeError, ValueError, AttributeError, RecursionError, ApiError) as error:
            await self._find_fault(use, calls)
            if isinstance(error, ApiError):
                raise
            raise ApiError(400, f"{field}: {error}", param=field) from error
        return grammar

    def _options(self, use: ToolUse, calls: Mapping[str, Parts], content: Part | None) -> list[Parts]:
        """Return the forms of an answer after its reasoning."""
        markup = self._format
        content_end = "" if markup is None else markup.content[1] + markup.ends[0]
        end: list[Part] = [Either([[content_end], []])] if content_end else []
        if markup is None or not calls:
            return [[content or Text(), *end]]
        opening = markup.call[0] + markup.before_name
        begins = markup.content[1] + markup.section[0] + opening
        limit = None if use.is_parallel else 1
        following: Parts = [Repeat([Either([*calls.values()])], [markup.between + opening], limit)]
        following = [*following, markup.section[1] + markup.ends[0]]
        if use.required:
            return [[begins, *following]]
        if content is not None:
            return [[begins, *following], [content, *end]]
        begins = begins.lstrip("\n")  # Content may end in any way.
        plain = Text(excludes=[f"(?s:.*){as_regex(begins)}(?s:.*)"])
        return [[Text(begins), *following], [plain, *end]]

    def _calls(self, use: ToolUse) -> dict[str, Parts]:
        """Return the calls of each function that may be called, by the path of its schema."""
        assert self._format is not None
        calls: dict[str, Parts] = {}
        for number, tool in enumerate(use.tools):
            function, path = tool["function"], f"tools.{number}.{use.schema_field}"
            if use.required and function["name"] not in use.required:
                continue
            if not use.follows_schema(function["name"]):
                calls[path] = free_call(self._format, function["name"])
                continue
            try:
                calls[path] = written_call(self._format, function["name"], function.get("parameters"))
            except UnwrittenSchema as error:
                path = ".".join([path, *error.path])
                raise ApiError(400, f"{path}: {error}", param=path) from error
            except (TypeError, ValueError, AttributeError, RecursionError) as error:  # keywords of other types
                raise ApiError(400, f"{path} is no JSON schema: {error}", param=path) from error
        return calls

    async def _find_fault(self, use: ToolUse, calls: Mapping[str, Parts]) -> None:
        """Raise ApiError with the path of a function's schema if it alone cannot be served."""
        for number, tool in enumerate(use.tools):
            path = f"tools.{number}.{use.schema_field}"
            if path not in calls or not use.follows_schema(tool["function"]["name"]):
                continue
            try:
                alone = parts_grammar(calls[path], self._special_tokens)
                await self._checks.check(alone, path, self._model)
            except (TypeError, ValueError, AttributeError, RecursionError, ApiError) as error:
                schema = Grammar("json_schema", json.dumps(tool["function"].get("parameters", {})))
                await self._checks.check(schema, path, self._model)  # Its fault has a longer path.
                raise error if isinstance(error, ApiError) else ApiError(400, f"{path}: {error}", param=path) from error

    @cached_property
    def _special_tokens(self) -> dict[str, int]:
        """Return the ids of special tokens by text. For llguidance, tokens in angle brackets are special, too.

        Other added tokens are text to a grammar.
        """
        return {
            text: number
            for text, (number, is_special) in self._added.items()
            if is_special or (text[:1] == "<" and text[-1:] == ">")
        }

    def _may_reason(self, prompt: Prompt) -> bool:
        """Return whether an answer may open a reasoning: it is a token for models that do."""
        return prompt.may_reason and self._reasoning is not None and self._reasoning[0] in self._added


def _part(grammar: Grammar) -> Part | None:
    """Return a grammar as a part of another, None if it cannot be one."""
    match grammar.kind:
        case "json_object":
            return Schema({"type": "object"})
        case "json_schema":
            value = json.loads(grammar.text)
            return Schema(value if isinstance(value, dict) else {})
        case "choice":
            return Either([[text] for text in json.loads(grammar.text)])
    return None
