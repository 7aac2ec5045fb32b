"""Grammars of tool calls: every answer is read as calls of the functions, with arguments of their schemas."""

import asyncio
import json
import random
from contextlib import suppress
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance.hf import from_tokenizer
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from dcpmla.runtime.grammar import Grammar
from dcpmla.runtime.grammar_text import compile_grammar
from dcpmla.runtime.grammars import Follower
from dcpmla.serving.answer_grammars import AnswerGrammars
from dcpmla.serving.background import Prepared
from dcpmla.serving.chat.formats import FORMATS
from dcpmla.serving.errors import ApiError
from dcpmla.serving.messages import Started
from dcpmla.serving.prompts import Prompt
from dcpmla.serving.structured import GrammarChecks
from dcpmla.serving.tools import ToolUse
from tests.serving.chat.answers import KINDS, markers_of, parser_of, stream
from tests.support.small_tokenizers import byte_level
from tests.support.workers import worker_of

TEXT = {"type": "string", "maxLength": 4}
DAY = {"type": "string", "pattern": "^[0-3][0-9]\\.$"}
SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"enum": ["Bonn", "x\n</y>", 7]},
            "day": {"$ref": "#/$defs/day"},
            "note": {
                "anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}, {"type": "integer", "maximum": 9}]
            },
            "any": {},
        },
        "required": ["city", "note"],
        "additionalProperties": False,
        "$defs": {"day": DAY},
    },
    "clock.set": {
        "type": "object",
        "properties": {"zone": {"type": "integer"}, "on": {"type": ["boolean", "string"]}, "text": {"type": "string"}},
        "additionalProperties": False,
    },
    "list": {
        "type": "object",
        "properties": {"tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2}},
        "required": ["tags"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
TOOLS.append({"type": "function", "function": {"name": "refresh"}})
STRICT = dict.fromkeys([*SCHEMAS, "refresh"], True)
VALIDATORS = {
    name: jsonschema.Draft202012Validator(schema)
    for name, schema in {**SCHEMAS, "refresh": {"additionalProperties": False}}.items()
}
ENDS = '"}]/<>1'


@cache
def tokenizer_of(name: str, is_special: bool = True) -> Any:
    """Return a byte-level tokenizer with a family's markup: boundaries are special tokens, or tokens of plain text."""
    texts = {text.strip() for text in markers_of(name)} - {'">', "```json"}
    if "DSML" in str(texts):
        texts = {"<think>", "</think>", "｜DSML｜"}
    if name == "kimi_k3":
        texts = {"<|open|>", "<|close|>", "<|sep|>"}
    backend = byte_level().backend_tokenizer
    backend.add_tokens([AddedToken(text, special=is_special, normalized=False) for text in sorted(texts)])
    backend.add_special_tokens(["<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def written(tokenizer: Any, grammar: Grammar, seed: int, begun: str = "", limit: int = 2000) -> str | None:
    """Return a random text of a grammar after its beginning, with special tokens; None if it does not end."""
    eos = tokenizer.eos_token_id
    matcher = matcher_of(tokenizer, grammar.kind, grammar.text).deep_copy()
    follower = Follower(matcher, "", [eos], ())
    chooser, tokens = random.Random(seed), list[int]()
    weights = np.ones(len(tokenizer))
    weights[list(tokenizer.added_tokens_decoder)] = 40
    for letter in ENDS:
        weights[tokenizer(letter)["input_ids"]] = 20
    tokens += tokenizer(begun)["input_ids"]
    follower.advance(tokens)
    assert not follower.error
    for _ in range(limit):
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint32).copy()
        follower.finish(bits, (), is_free=False, is_short=False)
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[: len(tokenizer)])
        assert len(allowed), follower.error
        (token,) = chooser.choices(allowed.tolist(), weights[allowed])
        if token == eos:
            return str(tokenizer.decode(tokens))
        tokens.append(token)
        follower.advance(tokens)
        assert not follower.error
    return None


@cache
def matcher_of(tokenizer: Any, kind: str, text: str) -> Any:
    return compile_grammar(vocabulary_of(tokenizer), kind, text)


@cache
def vocabulary_of(tokenizer: Any) -> Any:
    return from_tokenizer(tokenizer, len(tokenizer), [tokenizer.eos_token_id])


def grammars_of(name: str, is_special: bool = True) -> AnswerGrammars:
    tokenizer = tokenizer_of(name, is_special)
    prepared = Prepared(Started("", len(tokenizer), 10_000, 4, 10_000), tokenizer)
    return AnswerGrammars(prepared, FORMATS[name], FORMATS[name], checks_of(name, is_special))


@cache
def checks_of(name: str, is_special: bool) -> GrammarChecks:
    """Return checks with a tokenizer's vocabulary, whose process is forked once."""
    return GrammarChecks(worker_of(tokenizer_of(name, is_special)))


def grammar_of(name: str, use: ToolUse, asked: Grammar | None = None, **prompt: Any) -> Grammar:
    grammar = asyncio.run(grammars_of(name).grammar(use, Prompt([1], "", **prompt), asked, "response_format"))
    assert grammar is not None
    return grammar


def opening_of(name: str) -> str:
    """Return the text before the name of the first function."""
    markup = FORMATS[name]
    return markup.content[1] + markup.section[0] + markup.call[0] + markup.before_name


def texts_of(name: str, grammar: Grammar, begun: str = "", num: int = 8, is_special: bool = True) -> list[str]:
    """Return random texts of a grammar after its beginning: those that end."""
    found = (written(tokenizer_of(name, is_special), grammar, seed, begun) for seed in range(num))
    texts = [text for text in found if text is not None]
    assert texts
    return texts


def read(name: str, text: str) -> tuple[str, str, list[dict[str, Any]]]:
    """Return the reasoning, the content and the calls of an answer, whose arguments must be valid."""
    reasoning, content, calls = stream(parser_of(name, TOOLS), [text])
    for call in calls:
        VALIDATORS[call["name"]].validate(json.loads(call["arguments"]))
    return reasoning, content, calls


@pytest.mark.parametrize(
    ("name", "is_special"),
    [*((name, True) for name in FORMATS), *(pytest.param(*each.values, False, marks=each.marks) for each in KINDS)],
)
def test_required_calls_are_read_by_the_parser(name: str, is_special: bool) -> None:
    grammars = grammars_of(name, is_special)
    for use, num in ((ToolUse(TOOLS, required=[*SCHEMAS, "refresh"]), 5), (ToolUse(TOOLS, False, ["weather"]), 3)):
        grammar = asyncio.run(grammars.grammar(use, Prompt([1], ""), None, ""))
        assert grammar is not None
        names = []
        for text in texts_of(name, grammar, "", num, is_special):
            reasoning, content, calls = read(name, text)
            assert (reasoning, content) == ("", ""), text
            assert calls, text
            assert use.is_parallel or len(calls) == 1, text
            names += [call["name"] for call in calls]
        assert len({*names}) > 1 if use.is_parallel else {*names} == {"weather"}


@pytest.mark.parametrize("name", KINDS)
def test_strict_calls_come_after_any_text(name: str) -> None:
    """Without markup the answer is a text; with it, calls follow the schemas. The model may reason first."""
    opens = name != "kimi_k3"  # its prompts open the reasoning, or the content
    grammar = grammar_of(name, ToolUse(TOOLS, strict=STRICT), may_reason=opens)
    start, end = FORMATS[name].reasoning if opens else ("", "")
    called = f"I look </ here{opening_of(name)}"
    for begun, expected in (
        (called, "I look </ here"),
        (f"{start}{'hm' * opens}{end}{called}", "I look </ here"),
        ("plain", None),
    ):
        for text in texts_of(name, grammar, begun, 4):
            reasoning, content, calls = read(name, text)
            assert content == expected or (expected is None and content.startswith("plain")), text
            assert calls or expected is None, text
            assert reasoning == ("hm" if "hm" in begun and opens else ""), text


@pytest.mark.parametrize("name", ["glm47", "deepseek_v31", "mistral"])
def test_structured_output_beside_tools(name: str) -> None:
    """The answer calls a tool, or is JSON of the schema, after the reasoning that the model may open."""
    asked = Grammar("json_schema", json.dumps(SCHEMAS["list"]))
    grammar = grammar_of(name, ToolUse(TOOLS, strict=STRICT), asked, may_reason=True)
    start, end = FORMATS[name].reasoning
    for begun in (opening_of(name), "{", f"{start}hm{end}" + "{"):
        for text in texts_of(name, grammar, begun):
            _, content, calls = read(name, text)
            if begun.endswith("{"):
                jsonschema.validate(json.loads(content), SCHEMAS["list"])
            assert bool(calls) is not begun.endswith("{")


def test_a_grammar_starts_after_the_reasoning() -> None:
    asked = Grammar("json_object")
    for name, length in (("glm47", 1), ("kimi_k3", 6 + len("thinkresponse"))):
        grammar = grammar_of(name, ToolUse(), asked, in_reasoning=True)
        end = FORMATS[name].reasoning[1] + FORMATS[name].content[0]
        assert tokenizer_of(name).decode(grammar.starts_after) == end
        assert len(grammar.starts_after) <= length
        assert (grammar.kind, grammar_of(name, ToolUse(), asked)) == ("json_object", asked)
        required = ToolUse(TOOLS, required=["list"])
        assert grammar_of(name, required, asked, in_reasoning=True).starts_after == grammar.starts_after
    regex = Grammar("regex", "a+")
    assert grammar_of("glm47", ToolUse(TOOLS), regex, may_reason=True) == regex


def tool(**schema: Any) -> list[dict[str, Any]]:
    return [TOOLS[2], {"type": "function", "function": {"name": "f", "parameters": {"type": "object", **schema}}}]


@pytest.mark.parametrize(
    ("name", "schema", "path", "words"),
    [
        ("mistral", {"properties": {"a": {"uniqueItems": True}}}, ".properties.a", "uniqueItems"),
        ("glm47", {"properties": {"a": {"type": "array", "uniqueItems": True}}}, ".properties.a", "uniqueItems"),
        ("glm47", {"anyOf": [{"required": ["a"]}]}, ".anyOf", "cannot keep to it"),
        ("ling", {"minProperties": 1}, "", "minProperties"),
        ("kimi_k3", {"properties": {"a": {"pattern": "^a|b"}}}, ".properties.a.pattern", "need brackets"),
        ("kimi_k3", {"properties": {"a": {"pattern": "a(?=b)"}}}, ".properties.a", ""),
        ("glm47", {"properties": {"a": {"$ref": "#/properties/a"}}}, ".properties.a", "nested too deep"),
        ("glm47", {"type": "array"}, ".type", "must be 'object'"),
        ("glm47", {"properties": {"a": {"enum": 7}}}, ".properties.a", "enum must be an array"),
    ],
)
def test_a_fault_has_its_path(name: str, schema: dict[str, Any], path: str, words: str) -> None:
    use = ToolUse(tool(**schema), required=["f"], schema_field="parameters")
    with pytest.raises(ApiError) as caught:
        grammar_of(name, use)
    assert caught.value.param == f"tools.1.parameters{path}"
    assert words in caught.value.message


CIRCLE = {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a"]}


@pytest.mark.parametrize(
    "name",
    ["glm47", "mistral", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("deepseek_v32", "kimi_k3"))],
)
@pytest.mark.parametrize("is_required", [True, False])
@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"enum": []}}, "required": ["a"]},
        {"properties": {"a": False}, "required": ["a"]},
        {"properties": {"a": {"type": "integer", "minimum": 3, "maximum": 2}}, "required": ["a"]},
        {"properties": {}, "required": ["a"], "additionalProperties": False},
        {"properties": {"a": {"$ref": "#/$defs/none"}}},
        {"properties": {"a": CIRCLE}, "$defs": {"n": CIRCLE}},
    ],
)
def test_arguments_without_values_are_refused(name: str, is_required: bool, schema: dict[str, Any]) -> None:
    """Before any token, whether a call is required or may come after any text."""
    use = ToolUse(tool(**schema), required=["f"] if is_required else (), strict={"f": True}, schema_field="parameters")
    with pytest.raises(ApiError) as caught:
        grammar_of(name, use)
    assert str(caught.value.param).startswith("tools.1.parameters")


@pytest.mark.parametrize("name", ["glm47", "deepseek_v41", "kimi_k3", "mistral"])
def test_references_lead_into_the_function_s_schema(name: str) -> None:
    size = {"type": "integer", "minimum": 0, "maximum": 3}
    properties = {
        "size": size,
        "child": {"type": "object", "properties": {"size": {"$ref": "#/properties/size"}}, "required": ["size"]},
        "more": {"type": "array", "items": {"$ref": "#"}, "minItems": 1, "maxItems": 1},
    }
    schema = {"properties": properties, "required": ["size", "child"], "additionalProperties": False}
    properties["child"]["additionalProperties"] = False
    grammar = grammar_of(name, ToolUse(tool(**schema), False, required=["f"]))
    validator = jsonschema.Draft202012Validator({"type": "object", **schema})
    for text in texts_of(name, grammar, num=12):
        (call,) = stream(parser_of(name, tool(**schema)), [text])[2]
        validator.validate(json.loads(call["arguments"]))


@pytest.mark.parametrize("name", KINDS)
def test_calls_of_functions_that_are_not_strict_are_free(name: str) -> None:
    """A schema that cannot be enforced is then no fault, and the parser reads what the grammar allows."""
    tools = tool(properties={"a": {"type": "array", "uniqueItems": True}}, anyOf=[{"required": ["a"]}])
    grammar = grammar_of(name, ToolUse(tools, strict={"list": True}))
    texts = texts_of(name, grammar, opening_of(name) + "f", 9)
    calls = [stream(parser_of(name, tools), [text])[2] for text in texts]
    assert all(isinstance(json.loads(call["arguments"]), dict) for each in calls for call in each)


@pytest.mark.parametrize("name", ["glm47", "mistral"])
@pytest.mark.parametrize("keyword", ["type", "enum", "properties", "required", "minProperties", "minLength", "anyOf"])
def test_odd_schemas_are_refused_or_served(name: str, keyword: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_check(*args: object) -> None: ...

    monkeypatch.setattr(GrammarChecks, "check", no_check)
    odd: list[Any] = ["a", 7, [7], [{}], {"a": 7}, None]
    for value in odd:
        for schema in ({keyword: value}, {"properties": {"a": {keyword: value}}}):
            with suppress(ApiError):
                grammar_of(name, ToolUse(tool(**schema), required=["f"]))


def test_wrapped_calls_keep_to_schemas_that_tags_cannot() -> None:
    use = ToolUse(tool(anyOf=[{"required": ["a"], "properties": {"a": {"type": "integer"}}}]), required=["f"])
    assert not any("arg_key" in text for text in texts_of("ling", grammar_of("ling", use), num=9))
