"""The parser next to transformers' own parser of responses, which has one template for each family."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.serving.chat.answers import TEMPLATES, TOOLS, cut, parser_of, render, some_calls, stream

chat_parsing = pytest.importorskip("transformers.utils.chat_parsing", reason="transformers has it since 5.24")

_FUNCTION = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_THINK = {"open": "<think>", "close": "</think>", "content": "text", "content_args": {"strip": False}}
_TEXT = {"content": "text", "content_args": {"strip": False}}
RESPONSES = {  # this test's own templates: transformers has none for these families
    "kimi_k2": {
        "reasoning": _THINK,
        "calls": {
            "open_pattern": r"(?:<\|tool_calls_section_begin\|>)?<\|tool_call_begin\|>functions\.(?P<name>[\w.-]+):\d+"
            r"<\|tool_call_argument_begin\|>",
            "close_pattern": r"<\|tool_call_end\|>(?:<\|tool_calls_section_end\|>)?",
            "repeats": True,
            "content": "json",
            "transform": _FUNCTION,
        },
        "content": _TEXT,
    },
    "glm47": {
        "reasoning": _THINK,
        "calls": {
            "open_pattern": r"<tool_call>(?P<name>[\w.-]+)",
            "close": "</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<arg_key>(?P<key>.*?)</arg_key><arg_value>(?P<value>.*?)</arg_value>",
                "value_parser": {"name": "text", "args": {"strip": False}},
            },
            "transform": _FUNCTION,
        },
        "content": _TEXT,
    },
}


@pytest.mark.parametrize("name", list(RESPONSES))
@given(data=st.data())
def test_transformers_parses_the_same(name: str, data: st.DataObject) -> None:
    """Texts with markup are left out: transformers ends a call at the first end, also inside a text."""
    calls = data.draw(some_calls(name).filter(lambda calls: "<" not in json.dumps(calls)))
    answer = render(TEMPLATES[name], "so it is", "Hi", calls)
    template = {"start_anchor": "|", "defaults": {}, "fields": RESPONSES[name]}
    message = chat_parsing.parse_response(answer, template, prefix="", tools=TOOLS)
    reasoning, content, shown = stream(parser_of(name), cut(answer, [5]))
    assert (reasoning, content) == (message["reasoning"], message["content"])
    ours = [{"name": call["name"], "arguments": json.loads(call["arguments"])} for call in shown]
    assert ours == [call["function"] for call in message.get("calls", [])]
