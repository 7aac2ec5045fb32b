"""OpenAI's responses, as its client and agents without storage speak them, with a script."""

import json
from typing import Any

import httpx2
import openai
import pytest

from dcpmla.serving.responses_body import messages_of
from tests.support.agent import CODEX, SUM, WEATHER, call, run
from tests.support.fake_ranks import RunningScript
from tests.support.servers import AUTHORIZED, KEY

TOOLS: Any = [{"type": "function", "strict": False, **tool["function"]} for tool in (WEATHER, SUM)]

UNIQUE = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
FORMAT: Any = {"type": "json_schema", "name": "a", "strict": True, "schema": {"type": "object"}}


@pytest.fixture
def client(scripted: RunningScript) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{scripted.url}/v1", api_key=KEY, max_retries=0, timeout=60)


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.responses.create(**{"model": "scripted", "input": "hi", "store": False, **fields})


def kinds(items: Any) -> list[str]:
    return [item.type for item in items]


def test_a_text_with_reasoning(client: openai.OpenAI, scripted: RunningScript) -> None:
    response = ask(client, metadata={"a": "b"}, temperature=0.5, max_output_tokens=100)
    assert (response.status, response.output_text, response.incomplete_details) == ("completed", "hello you", None)
    assert kinds(response.output) == ["reasoning", "message"]
    assert response.output[0].content[0].text == "so so"
    assert (response.metadata, response.temperature, response.top_p, response.max_output_tokens) == (
        {"a": "b"},
        0.5,
        1.0,
        100,
    )
    usage, encoded = response.usage, scripted.num_tokens
    assert usage.output_tokens_details.reasoning_tokens == encoded("so so</think>")
    assert usage.output_tokens == encoded("so so</think>hello<|pad|> you<|end|>")
    assert usage.input_tokens == encoded(scripted.prompt)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    params = scripted.latest.params
    assert (params.temperature, params.max_new_tokens) == (0.5, 100)
    plain = ask(client, reasoning={"effort": "none"})
    assert kinds(plain.output) == ["message"]
    assert plain.output[0].content[0].text == "hello you"


def test_an_answer_that_is_cut(client: openai.OpenAI) -> None:
    response = ask(client, max_output_tokens=2)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [item.status for item in response.output] == ["incomplete"]
    events = list(ask(client, max_output_tokens=2, stream=True))
    assert events[-1].type == "response.incomplete"
    assert events[-2].item.status == "incomplete"


def test_the_client_s_own_stream(client: openai.OpenAI) -> None:
    with client.responses.stream(model="scripted", input="hi", tools=TOOLS, store=False) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert snapshots[-1] == "I look. "
    assert json.loads(final.output[-1].arguments) == {"city": "Rome"}  # type: ignore[union-attr]


@pytest.mark.parametrize("streams", [False, True])
def test_an_agent_of_three_turns(client: openai.OpenAI, scripted: RunningScript, streams: bool) -> None:
    """It sends back all items, as agents do that rely on no storage."""
    items: list[Any] = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
    for _ in range(3):
        fields = {
            "tools": TOOLS,
            "input": items,
            "instructions": "Be short.",
            "include": ["reasoning.encrypted_content"],
        }
        response = [*ask(client, stream=True, **fields)][-1].response if streams else ask(client, **fields)
        items += [item.model_dump(exclude_none=True) for item in response.output]
        for each in response.output:
            if each.type == "function_call":
                result = run(each.name, json.loads(each.arguments))
                items.append({"type": "function_call_output", "call_id": each.call_id, "output": result})
    assert response.output_text == "It is 23."
    prompt = scripted.prompt
    calls = call("weather", city="Bärlin") + call("weather", city="Rome")
    assert f"<|system|>Be short.<|end|><|user|>hi<|end|><|assistant|><think>two cities</think>I look. {calls}" in prompt
    assert f"<|assistant|><think>now add</think>{call('add', a=3, b=20)}<|end|><|tool|>23" in prompt


def test_items_of_one_answer_are_one_message() -> None:
    def reasoning(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}

    function = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    said = {"role": "assistant", "content": "b"}
    called = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    thought = {"reasoning_content": "r", "reasoning": "r"}
    assert messages_of([reasoning("r"), said, function, function]) == [
        {"role": "assistant", "content": "b", **thought, "tool_calls": [called, called]}
    ]
    assert messages_of([function, said, reasoning("r"), function]) == [
        {"role": "assistant", "content": "b", **thought, "tool_calls": [called, called]}
    ]
    result = {"type": "function_call_output", "call_id": "a", "output": "o"}
    assert messages_of([said, function, said, result, said, said]) == [
        {"role": "assistant", "content": "bb", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "a", "content": "o"},
        {"role": "assistant", "content": "b"},
        {"role": "assistant", "content": "b"},
    ]
    hidden = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
    summed = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "r"}]}
    assert messages_of([hidden, summed, said]) == [{"role": "assistant", "content": "b", **thought}]


def test_what_is_refused(client: openai.OpenAI) -> None:
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("store", {"store": True}),
        ("background", {"background": True}),
        ("truncation", {"truncation": "auto"}),
        ("include", {"include": ["message.output_text.logprobs"]}),
        ("text.format.type", {"text": {"format": {"type": "grammar"}}}),
        (
            "text.format.schema.properties.a",
            {"text": {"format": {**FORMAT, "schema": {"properties": {"a": {"not": {}}}}}}},
        ),
        ("tools.0.parameters.properties.a", {"tools": [{**TOOLS[0], "strict": True, "parameters": UNIQUE}]}),
        (
            "tools.1.parameters.properties.a",
            {"tools": [{"type": "web_search"}, {**TOOLS[0], "strict": True, "parameters": UNIQUE}]},
        ),
        ("reasoning.mode", {"reasoning": {"mode": "pro"}}),
        ("tools.0", {"tools": [{"name": "weather"}]}),
        ("tools.1", {"tools": [TOOLS[0], {"type": 5}]}),
        ("tool_choice", {"tools": [{"type": "web_search"}], "tool_choice": "required"}),
        ("tools.0.strict", {"tools": [{**TOOLS[0], "strict": 1}]}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}),
        ("input.0", {"input": [{"type": "item_reference", "id": "a"}]}),
        ("input.0", {"input": [{"type": "computer_call_output", "call_id": "a"}]}),
        ("input.0.content", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}),
        ("input.0.call_id", {"input": [{"type": "function_call_output", "output": "x"}]}),
        ("input.0.arguments", {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": 1}]}),
        ("input", {"input": []}),
        ("max_output_tokens", {"max_output_tokens": 0}),
    ]
    for param, fields in wrong:
        with pytest.raises(openai.BadRequestError) as refused:
            ask(client, **fields)
        assert refused.value.param == param, fields
    neutral = {
        "background": False,
        "truncation": "disabled",
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "extra_body": {"client_metadata": {}, "cache_salt": "x", "max_tool_calls": 3},
    }
    assert ask(client, **neutral).output_text == "hello you"


def test_codex_with_all_its_settings(scripted: RunningScript) -> None:
    answered = httpx2.post(f"{scripted.url}/v1/responses", json=CODEX, headers=AUTHORIZED)
    assert answered.status_code == 200, answered.text
    assert "event: response.completed" in answered.text
    prompt = scripted.prompt
    shown = "You are Codex.", "sandbox", "cwd", "Fix it.", "exec_command", "update_plan", "a.py", "apply_patch"
    for each in (*shown, "mcp__docs__find"):
        assert each in prompt
    for left_out in ("web_search", "local_shell", "tool_search", "image_generation"):
        assert left_out not in prompt


def test_formats_and_required_calls_have_grammars(client: openai.OpenAI, scripted: RunningScript) -> None:
    fields: list[dict[str, Any]] = [{"text": {"format": FORMAT}}, {"text": {"format": {"type": "json_object"}}}]
    fields += [
        {"tools": TOOLS, "tool_choice": choice} for choice in ("required", {"type": "function", "name": "weather"})
    ]
    end = scripted.tokenizer.convert_tokens_to_ids("</think>")
    for each in fields:
        response = ask(client, **each)
        grammar = scripted.latest.params.grammar
        assert grammar is not None
        assert grammar.starts_after == (end,)
        assert response.text.format.type == each.get("text", {"format": {"type": "text"}})["format"]["type"]
    assert kinds(response.output)[-1] == "function_call"
    assert len([item for item in response.output if item.type == "function_call"]) == 1


def test_errors_in_a_stream(mute: RunningScript) -> None:
    """The request's time is over."""
    text = httpx2.post(f"{mute.url}/v1/responses", json={"input": "hi", "stream": True}, headers=AUTHORIZED).text
    name, data = text.strip().split("\n\n")[-1].split("\n")
    failed = json.loads(data.removeprefix("data: "))
    assert (name, failed["type"]) == ("event: response.failed", "response.failed")
    assert (failed["response"]["status"], failed["response"]["error"]["code"]) == ("failed", "timeout")
