"""Structured output over HTTP: answers that real clients validate, and refusals with their paths."""

import json
from collections.abc import Iterator
from enum import Enum
from typing import Any

import httpx2
import jsonschema
import pytest
from msgspec.structs import replace
from openai import BadRequestError, OpenAI
from pydantic import BaseModel, Field

from dcpmla.extras import EXTRAS
from dcpmla.runtime.grammar import Grammar
from dcpmla.serving.background import prepare
from dcpmla.serving.errors import ApiError
from dcpmla.serving.messages import Started
from dcpmla.serving.structured import GrammarChecks
from dcpmla.serving.worker import Worker
from tests.support.random_model import LINES, save_random_model
from tests.support.servers import RunningServer, serve


class Colour(Enum):
    RED = "red"
    BLUE = "deep blue"


class Part(BaseModel):
    name: str = Field(max_length=4)
    colour: Colour | None
    size: int = Field(ge=0, le=99)


class Machine(BaseModel):
    """A machine of parts."""

    parts: list[Part] = Field(max_length=1)
    is_new: bool


# Its markup is Ling's; the prompts are short, for the model's context is.
TEMPLATE = "{# <tool_call> #}{% if tools %}T{% endif %}{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
ONE_LINE = dict.fromkeys(map(str, LINES), -100)  # Random models write long indentations after each end of a line.
MODEL = Started("", 300, 100, 4, 1000)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2, "x"]}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    model = tmp_path_factory.mktemp("model")
    save_random_model(model, TEMPLATE)
    options = ["--served-model-name", "random", "--dtype", "float32", "--speculative-method", "ngram"]
    with serve(tmp_path_factory.mktemp("server"), model, 2, *options) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_openai_s_client_parses_answers(client: OpenAI) -> None:
    """Several whole ones, and a stream."""
    completion = client.chat.completions.parse(
        model="random",
        messages=[{"role": "user", "content": "a machine"}],
        response_format=Machine,
        temperature=2.0,
        logit_bias=ONE_LINE,
        seed=0,
        n=4,
    )
    assert len(completion.choices) == 4
    for choice in completion.choices:
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Machine)
    wrapped = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}}
    stream = client.chat.completions.create(
        model="random", messages=[{"role": "user", "content": "x"}], response_format=wrapped, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    jsonschema.validate(json.loads(text), SCHEMA)


TOOL = {"name": "look", "parameters": SCHEMA}


def test_random_models_call_tools_where_they_must(server: RunningServer, client: OpenAI) -> None:
    """Over three routes: text of a random model under the grammar is read as one call with valid arguments."""
    fields = {"model": "random", "temperature": 2.0}
    user = {"role": "user", "content": "x"}
    choices = client.chat.completions.create(
        messages=[user],  # type: ignore[list-item]
        tools=[{"type": "function", "function": TOOL}],  # type: ignore[typeddict-item]
        tool_choice="required",
        parallel_tool_calls=False,
        n=3,
        seed=0,
        logit_bias=ONE_LINE,
        **fields,  # type: ignore[arg-type]
    ).choices
    assert len(choices) == 3
    for choice in choices:
        assert (choice.finish_reason, len(choice.message.tool_calls or ())) == ("tool_calls", 1)
        assert choice.message.tool_calls
        jsonschema.validate(json.loads(choice.message.tool_calls[0].function.arguments), SCHEMA)  # type: ignore[union-attr]
    form = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}}
    response = client.responses.create(input="x", text=form, store=False, **fields)  # type: ignore[call-overload]
    jsonschema.validate(json.loads(response.output_text), SCHEMA)
    body = {**fields, "messages": [user], "max_tokens": 256, "tool_choice": {"type": "tool", "name": "look"}}
    body["tools"] = [{"name": "look", "input_schema": SCHEMA}]
    message = httpx2.post(f"{server.url}/v1/messages", json=body, timeout=60).json()
    assert [block["type"] for block in message["content"]] == ["tool_use"]
    jsonschema.validate(message["content"][0]["input"], SCHEMA)


@pytest.mark.parametrize(
    ("outputs", "texts"),
    [
        ({"choice": ["né", "two words"]}, ["né", "two words"]),
        ({"regex": "(ab|c){2}", "choice": None, "json_object": False}, ["abab", "abc", "cab", "cc"]),
        ({"grammar": 'root ::= "x" ("1" | "2")'}, ["x1", "x2"]),
        ({"json": json.dumps({"enum": ["q", 7]})}, ['"q"', "7"]),
        ({"json": {"const": {"k": []}}}, None),
        ({"json_object": True}, None),
    ],
)
def test_completions_are_in_their_grammars(client: OpenAI, outputs: dict[str, Any], texts: list[str] | None) -> None:
    body = {"structured_outputs": outputs}
    completion = client.completions.create(
        model="random", prompt=["a", "b"], n=2, max_tokens=60, temperature=1.0, logit_bias={}, extra_body=body
    )
    for choice in completion.choices:
        if choice.finish_reason == "stop":
            assert choice.text in texts if texts else isinstance(json.loads(choice.text), dict)
        else:
            assert texts is None


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type", "must be text, json_object or json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "is missing"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"properties": {"a": {"not": {}}}}}}},
        "response_format.json_schema.schema.properties.a",
        'Unimplemented keys: ["not"]',
    ),
    (
        {"structured_outputs": {"json": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "strin"}}]}}},
        "structured_outputs.json.anyOf.1.items",
        "Invalid type: strin",
    ),
    (
        {"structured_outputs": {"json": {"$defs": {"d": {"minProperties": 2}}, "items": {"$ref": "#/$defs/d"}}}},
        "structured_outputs.json.$defs.d",
        "minProperties is 2",
    ),
    (
        {"structured_outputs": {"json": {"multipleOf": 999_979, "type": "integer"}}},
        "structured_outputs.json",
        "it takes too much time or memory to compile",
    ),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "no JSON"),
    ({"structured_outputs": {"json": "[" * 60_000}}, "structured_outputs.json", "no JSON"),
    ({"structured_outputs": {"json": [1]}}, "structured_outputs.json", "no JSON schema"),
    ({"structured_outputs": {"json": False}}, "structured_outputs", "give one of"),
    ({"structured_outputs": {"regex": "a(", "choice": ["a"]}}, "structured_outputs", "give one of"),
    ({"structured_outputs": {"regex": "a("}}, "structured_outputs.regex", "unclosed group"),
    ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex", "must be text"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "a JSON list"),
    ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar", "unknown name"),
    ({"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs.regex", "at most 65,536"),
    ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag", "not supported"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs", "both"),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos", "where its grammar does"),
    ({"guided_json": {}}, "guided_json", "it is json in structured_outputs here"),
]


@pytest.mark.parametrize(("body", "path", "words"), REFUSED)
def test_what_cannot_be_served_is_refused_with_its_path(
    client: OpenAI, body: dict[str, Any], path: str, words: str
) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.completions.create(model="random", prompt="a", extra_body=body)
    assert caught.value.param == path
    assert words in caught.value.message


@pytest.mark.parametrize(
    "outputs",
    [
        r'{"choice": ["\ud800"]}',
        r'{"json": "{\"const\": \"\\ud800\"}"}',
        json.dumps({"json": '{"items":' * 900 + "{}" + "}" * 900}),
        '{"json": ' + '{"items":' * 150 + '{"not": {}}' + "}" * 151,
    ],
)
def test_strange_texts_are_refused(server: RunningServer, outputs: str) -> None:
    content = f'{{"prompt": "a", "structured_outputs": {outputs}}}'
    assert httpx2.post(f"{server.url}/v1/completions", content=content).status_code == 400


async def test_equal_grammars_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []

    class Recording(Worker):
        async def call(self, model: Any, function: Any, *args: Any) -> None:
            checked.append(args[1])

    checks = GrammarChecks(Recording(prepare))
    for text in ("a", "b", "a", "b"):
        await checks.check(Grammar("regex", text), "x", MODEL)
    await checks.check(None, "x", MODEL)
    with pytest.raises(ApiError, match="x is not supported with this model's tokenizer: no bytes"):
        await checks.check(Grammar("regex", "c"), "x.y", replace(MODEL, no_grammars="no bytes"))
    monkeypatch.setitem(EXTRAS, "structured", ("no_such_package",))
    with pytest.raises(ApiError, match="x needs the extra structured, which is not installed on the server"):
        await checks.check(Grammar("regex", "c"), "x.y", MODEL)
    assert checked == ["a", "b"]
