"""Answers as the families' templates write them, with tools, calls and texts for the parsers of answers."""

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import strategies
from hypothesis.strategies import DrawFn, SearchStrategy, composite
from jinja2 import StrictUndefined, Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dcpmla.serving.chat.events import Pieces
from dcpmla.serving.chat.formats import FORMATS
from dcpmla.serving.chat.parser import MarkupParser

_DSML = """\
{%- macro tag(name) %}｜DSML｜SPACE{{ name }}{% endmacro -%}
<think>{{ reasoning }}</think>{{ content }}
{%- if calls %}{{ "\n\n<" + tag("SECTION") + ">\n" }}
{%- for call in calls %}<{{ tag("invoke") }} name="{{ call.name }}">{{ "\n" }}
{%- for key, value in call.arguments.items() -%}
{%- if not loop.first %}{{ "\n" }}{% endif -%}
<{{ tag("parameter") }} name="{{ key }}" string="{{ "true" if value is string else "false" }}">
{{- value if value is string else json(value) }}</{{ tag("parameter") }}>
{%- endfor %}{{ "\n</" + tag("invoke") + ">\n" }}{% endfor %}</{{ tag("SECTION") }}>{% endif %}"""
_JSON_OBJECT = """{{ '{"name": ' + json(call.name) + ', "arguments": ' + json(call.arguments) + '}' }}"""


def _dsml(section: str, space: str = "") -> str:
    return _DSML.replace("SECTION", section).replace("SPACE", space)


# What each family's published template (or encoding) writes after the text that opens an answer.
TEMPLATES = {
    "deepseek_v3": "<think>{{ reasoning }}</think>{{ content }}"
    "{% if calls %}<｜tool▁calls▁begin｜>{% for call in calls %}"
    "{{ '' if loop.first else '\n' }}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ call.name }}\n```json\n"
    "{{ json(call.arguments) }}\n```<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>{% endif %}",
    "deepseek_v31": "<think>{{ reasoning }}</think>{{ content }}"
    "{% if calls %}<｜tool▁calls▁begin｜>{% for call in calls %}"
    "<｜tool▁call▁begin｜>{{ call.name }}<｜tool▁sep｜>{{ json(call.arguments) }}<｜tool▁call▁end｜>{% endfor %}"
    "<｜tool▁calls▁end｜>{% endif %}",
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "deepseek_v41": _dsml("calls", space=" "),
    "kimi_k2": "<think>{{ reasoning }}</think>{{ content }}"
    "{% if calls %}<|tool_calls_section_begin|>{% for call in calls %}"
    "<|tool_call_begin|>functions.{{ call.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>"
    "{{ json(call.arguments) }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}",
    "kimi_k3": "<|open|>think<|sep|>{{ reasoning }}<|close|>think<|sep|><|open|>response<|sep|>{{ content }}"
    "<|close|>response<|sep|>{% if calls %}<|open|>tools<|sep|>{% for call in calls %}"
    '<|open|>call tool="{{ call.name }}" index="{{ loop.index }}"<|sep|>{% for key, value in call.arguments.items() %}'
    '<|open|>argument key="{{ key }}" type="{{ kind(value) }}"<|sep|>{{ value if value is string else json(value) }}'
    "<|close|>argument<|sep|>{% endfor %}<|close|>call<|sep|>{% endfor %}<|close|>tools<|sep|>{% endif %}"
    "<|close|>message<|sep|>",
    "glm45": "<think>{{ reasoning }}</think>\n{{ content }}{% for call in calls %}\n<tool_call>{{ call.name }}\n"
    "{% for key, value in call.arguments.items() %}<arg_key>{{ key }}</arg_key>\n<arg_value>"
    "{{ value if value is string else json(value) }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}",
    "glm47": "<think>{{ reasoning }}</think>{{ content }}{% for call in calls %}<tool_call>{{ call.name }}"
    "{% for key, value in call.arguments.items() %}<arg_key>{{ key }}</arg_key><arg_value>"
    "{{ value if value is string else json(value) }}</arg_value>{% endfor %}</tool_call>{% endfor %}",
    "longcat": "<longcat_think>{{ reasoning }}</longcat_think>{{ content }}{% for call in calls %}<longcat_tool_call>\n"
    + _JSON_OBJECT
    + "\n</longcat_tool_call>{% endfor %}",
    "mistral": "[THINK]{{ reasoning }}[/THINK]{{ content }}{% for call in calls %}[TOOL_CALLS]{{ call.name }}[ARGS]"
    "{{ json(call.arguments) }}{% endfor %}",
    "ling": "<think>{{ reasoning }}</think>\n{{ content }}{% for call in calls %}\n<tool_call>\n"
    + _JSON_OBJECT
    + "\n</tool_call>{% endfor %}",
}
# LongCat has a second form since Flash-Thinking-2601.
LONGCAT_TAGS = (
    TEMPLATES["glm45"]
    .replace("</think>\n", "</think>")
    .replace("\n<tool_call>", "<tool_call>")
    .replace("<arg", "<longcat_arg")
    .replace("</arg", "</longcat_arg")
    .replace("tool_call>", "longcat_tool_call>")
    .replace("think>", "longcat_think>")
)
_SCHEMAS = {
    "search": {
        "query": {"type": "string"},
        "limit": {"type": "integer"},
        "ratio": {"type": "number"},
        "exact": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "filter": {"type": "object"},
        "none": {"type": "null"},
    },
    "fs.write-file": {"path": {"type": "string"}, "text": {"anyOf": [{"type": "string"}]}},
    "refresh": {},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
    for name, properties in _SCHEMAS.items()
]
_ENVIRONMENT = ImmutableSandboxedEnvironment(undefined=StrictUndefined)
_ENVIRONMENT.globals["json"] = lambda value: json.dumps(value, ensure_ascii=False)
_ENVIRONMENT.globals["kind"] = lambda value: (
    "string" if isinstance(value, str) else "boolean" if isinstance(value, bool) else "object"
)

Call = dict[str, Any]
# Of formats with the same fields one runs on each commit: the others differ from it in their texts alone.
ALIKE = ("deepseek_v31", "deepseek_v4", "deepseek_v41", "glm45", "longcat")
KINDS = [pytest.param(name, marks=pytest.mark.thorough if name in ALIKE else ()) for name in FORMATS]


def render(template: str, reasoning: str, content: str, calls: list[Call]) -> str:
    """Return an answer as a template writes it."""
    return _compiled(template).render(reasoning=reasoning, content=content, calls=calls)


@cache
def _compiled(template: str) -> Template:
    return _ENVIRONMENT.from_string(template.rstrip("\n"))


def markers_of(name: str) -> list[str]:
    """Return the texts that structure answers in a format."""
    markup = FORMATS[name].bare
    texts = [*markup.reasoning, *markup.section, *markup.call, *markup.stops, *markup.dropped]
    if markup.tags is not None:
        texts += [markup.tags.start, markup.tags.end]
    return [text for text in texts if len(text) > 1]


def parser_of(name: str, tools: Sequence[dict[str, Any]] = TOOLS, **options: Any) -> MarkupParser:
    """Return a parser that reads everything, of an answer outside the reasoning."""
    defaults = {"in_reasoning": False, "parses_calls": True, "parses_reasoning": True}
    return MarkupParser(FORMATS[name], tools, **{**defaults, **options})


def cut(text: str, sizes: list[int]) -> list[str]:
    """Return a text in pieces whose sizes are repeated."""
    pieces, number = [], 0
    while text:
        size = sizes[number % len(sizes)]
        pieces.append(text[:size])
        text, number = text[size:], number + 1
    return pieces


def stream(parser: MarkupParser, pieces: list[str]) -> tuple[str, str, list[Call]]:
    """Return the reasoning, the content and the calls of a streamed answer; arguments are JSON text."""
    events = [*map(parser.push, pieces), parser.push("", is_over=True)]
    return "".join(each.reasoning for each in events), "".join(each.content for each in events), calls_of(events)


def calls_of(events: list[Pieces]) -> list[Call]:
    """Return the calls of an answer's pieces, in order; only a call's first piece has its id and name."""
    calls: list[Call] = []
    for piece in (piece for each in events for piece in each.calls):
        if piece.number == len(calls):
            assert piece.name
            assert piece.call_id
            calls.append({"id": piece.call_id, "name": piece.name, "arguments": ""})
        else:
            assert piece.number == len(calls) - 1
            assert piece.name is None
            assert piece.call_id is None
            assert piece.text
        calls[-1]["arguments"] += piece.text
    return calls


def texts(name: str) -> SearchStrategy[str]:
    """Return a strategy of texts with markup of a format, quotes and characters of all kinds."""
    marked = strategies.sampled_from([*markers_of(name), '"', "\\", "\n", "</", "{", "}", "'''", "é漢🙂", "\u2028"])
    plain = strategies.text(strategies.characters(exclude_categories=("Cs",)), max_size=8)
    return strategies.lists(marked | plain, max_size=6).map("".join)


def _values(name: str, schema: dict[str, Any]) -> SearchStrategy[Any]:
    text = texts(name)
    leaves = strategies.none() | strategies.booleans() | strategies.integers() | text
    nested = strategies.recursive(
        leaves, lambda inner: strategies.lists(inner, max_size=3) | strategies.dictionaries(text, inner, max_size=3)
    )
    kinds = {
        "string": text,
        "integer": strategies.integers(),
        "number": strategies.floats(allow_nan=False, allow_infinity=False),
        "boolean": strategies.booleans(),
        "array": strategies.lists(text, max_size=3),
        "object": strategies.dictionaries(text, nested, max_size=3),
        "null": strategies.none(),
    }
    return kinds[schema.get("type", "string")]


@composite
def some_calls(draw: DrawFn, name: str) -> list[Call]:
    """Draw calls of the tools whose texts a format can write: a text with a value's end and what follows it is not."""
    parameters = FORMATS[name].tags

    def is_written(value: Any) -> bool:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return parameters is None or not _ends_early(name, text)

    calls = []
    for _ in range(draw(strategies.integers(0, 3))):
        tool = draw(strategies.sampled_from(list(_SCHEMAS)))
        keys = draw(strategies.lists(strategies.sampled_from(sorted(_SCHEMAS[tool]) or [""]), unique=True))
        arguments = {
            key: draw(_values(name, _SCHEMAS[tool][key]).filter(is_written)) for key in keys if key in _SCHEMAS[tool]
        }
        calls.append({"name": tool, "arguments": arguments})
    return calls


def _ends_early(name: str, text: str) -> bool:
    markup = FORMATS[name].bare
    assert markup.tags is not None
    end, *after = (markup.tags.end, markup.tags.start, *markup.call, *markup.section)
    parts = (text + end).split(end)[1:]
    return any(part.lstrip().startswith(tuple(filter(None, after))) for part in parts)
