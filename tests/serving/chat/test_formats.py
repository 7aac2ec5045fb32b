"""The format of a model, the ids of its calls, the types of arguments."""

import json
import re
from typing import Any

import pytest

from dcpmla.serving.chat.formats import FORMATS, find_format
from dcpmla.serving.chat.values import json_of, schema_types
from tests.serving.chat.answers import TEMPLATES, parser_of, render, stream

CALL = {"name": "search", "arguments": {"query": "a"}}

KIMI = "<|tool_calls_section_begin|><|tool_call_begin|>{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
OWN = r"[0-9A-Za-z]{9}"  # Mistral's
IDS = [
    *((name, "", r"call_[0-9a-f]{24}") for name in FORMATS if name not in ("kimi_k2", "mistral")),
    ("mistral", "", OWN),
    ("mistral", "[TOOL_CALLS]search[CALL_ID]aB3dE6gH9[ARGS]{}", "aB3dE6gH9"),
    *(("mistral", f"[TOOL_CALLS]search[CALL_ID]{bad}[ARGS]{{}}", f"(?!{bad}){OWN}") for bad in ("short", "éB3dE6gH9")),
    ("kimi_k2", "", r"functions\.search:[01]"),
    ("kimi_k2", KIMI.format("functions.search:7"), r"functions\.search:7"),  # the template repeats the model's id
    ("kimi_k2", KIMI.format("functions.fs.write-file:0"), r"functions\.fs\.write-file:0"),
    ("kimi_k2", KIMI.format("search:1"), r"functions\.search:5"),  # five calls came before
    ("kimi_k2", KIMI.format("functions.search"), r"functions\.search:5"),
    ("kimi_k2", KIMI.format(" search\n"), r"functions\.search:5"),
]


@pytest.mark.parametrize(("name", "answer", "pattern"), IDS)
def test_ids_are_as_the_family_wants_them(name: str, answer: str, pattern: str) -> None:
    """By default of two calls that a template writes."""
    answer = answer or render(TEMPLATES[name], "hm", "Hi", [CALL, CALL])
    ids = [call["id"] for call in stream(parser_of(name, first_call=5), [answer])[2]]
    assert ids
    assert all(re.fullmatch(pattern, each) for each in ids)
    assert len({*ids}) == len(ids)


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_the_markup_of_a_template_finds_the_format(name: str) -> None:
    template = TEMPLATES[name]
    if name.startswith("deepseek") and "DSML" in template:
        template = render(template, "", "", [CALL])
    if name == "glm45":
        template = "{{ '\\n<tool_call>' + call.name }}<arg_key>"
    for model_type in ("llama", "deepseek_v3", "kimi_k2"):
        chosen = find_format(model_type, template)
        assert chosen is not None
        assert chosen.name == name


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("deepseek_v32", "deepseek_v32"),
        ("deepseek_v41_text", "deepseek_v41"),
        ("kimi_k3", "kimi_k3"),
        ("glm_moe_dsa", "glm47"),
        ("glm5_next_text", "glm47"),
        ("longcat_flash", "longcat"),
        ("mistral_large4_text", "mistral"),
        ("bailing_hybrid", "ling"),
        ("llama", None),
    ],
)
@pytest.mark.parametrize("template", [None, "{{ messages[0].content }}"])
def test_the_type_finds_the_format(model_type: str, name: str | None, template: str | None) -> None:
    chosen = find_format(model_type, template)
    assert (chosen and chosen.name) == name


@pytest.mark.parametrize(
    ("fields", "arguments"),
    [
        ('{"name": "search"}', "{}"),
        ('{ "name" : "search" , "parameters" : {"query": 1} }', '{"query": 1}'),
        ('{"name": "search", "id": "}", "arguments": {"query": "\\u00e9"}}', '{"query": "é"}'),
        ('{"name": "search", "id": 1}', "{}"),
    ],
)
@pytest.mark.parametrize("size", [1, 5, 100])
def test_wrapped_calls(fields: str, arguments: str, size: int) -> None:
    answer = f"<tool_call>\n{fields}\n</tool_call>"
    pieces = [answer[start : start + size] for start in range(0, len(answer), size)]
    _, content, calls = stream(parser_of("ling"), pieces)
    assert (content, [call["arguments"] for call in calls]) == ("", [arguments])


@pytest.mark.parametrize(
    "text", ['<tool_call>{"arguments": {}, "name": "search"}</tool_call>', '<tool_call>{"name": 1}', '<tool_call>{"n']
)
def test_other_objects_are_text(text: str) -> None:
    assert stream(parser_of("ling"), [text]) == ("", text, [])


REFERRED: dict[str, Any] = {
    "properties": {
        "text": {"$ref": "#/$defs/name~1of"},
        "loop": {"$ref": "#/properties/loop"},
        "far": {"$ref": "https://example.com/schema"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "many": {"type": ["string", "integer"]},
        "choice": {"enum": ["a", 1]},
        "same": {"const": "a"},
        "odd": {"type": 3, "allOf": "x", "enum": {}},
        "long": {"$ref": "#/$defs/" + "x" * 2000},
    },
    "$defs": {"name/of": {"type": "string"}, "x" * 2000: {"type": "string"}},
}


@pytest.mark.parametrize(
    ("key", "types"),
    [
        ("text", {"string"}),
        ("loop", set()),
        ("far", set()),
        ("maybe", {"string", "null"}),
        ("many", {"string", "integer"}),
        ("choice", {"string", "integer", "number"}),
        ("same", {"string"}),
        ("odd", set()),
        ("long", set()),
        ("unknown", set()),
    ],
)
def test_types_of_a_schema(key: str, types: set[str]) -> None:
    assert schema_types(REFERRED, key) == types
    assert schema_types({}, key) == schema_types({"properties": []}, key) == set()


class Counted(dict[str, Any]):
    """A part of a schema that counts how often it is looked at."""

    num = 0

    def get(self, key: str, default: Any = None) -> Any:
        Counted.num += key == "type"
        return super().get(key, default)


@pytest.mark.parametrize("union", ["anyOf", "oneOf", "allOf"])
def test_few_parts_of_a_schema_are_looked_at(union: str) -> None:
    inner: Any = Counted({"$ref": "#/$defs/x"})
    Counted.num = 0
    for _ in range(3):
        inner = Counted({union: [inner] * 10_000})
    assert schema_types({"properties": {"a": inner}, "$defs": {"x": inner}}, "a") == set()
    assert 0 < Counted.num <= 64


@pytest.mark.parametrize("field", ["enum", "type"])
def test_the_first_items_of_a_long_list_stand_for_all(field: str) -> None:
    few, last = (["string"], "null") if field == "type" else (["a"], None)
    assert schema_types({"properties": {"a": {field: few * 64 + [last] * 10_000}}}, "a") == {"string"}
    assert schema_types({"properties": {"a": {field: few * 63 + [last]}}}, "a") == {"string", "null"}


@pytest.mark.parametrize(
    ("text", "types", "expected"),
    [
        ("5", {"string", "null"}, "5"),
        ("null", {"string", "null"}, None),
        ('"a"', {"string", "null"}, '"a"'),
        ("5", {"integer"}, 5),
        (" [1, 2]\n", {"array"}, [1, 2]),
        ("a", {"integer"}, "a"),
        ("NaN", {"number"}, "NaN"),
        ("5", set(), 5),
        ('"a"', set(), "a"),
        ("a b", set(), "a b"),
        ("[" * 100_000, {"array"}, "[" * 100_000),
        ("9" * 10_000, {"integer"}, "9" * 10_000),  # more digits than Python reads
    ],
)
def test_values_have_the_types_that_their_schema_allows(text: str, types: set[str], expected: object) -> None:
    assert json.loads(json_of(text, frozenset(types))) == expected
