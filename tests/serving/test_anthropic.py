"""Anthropic's messages, as its client and its agents speak them, with a script."""

from typing import Any

import httpx2
import pytest

from tests.support.agent import CLAUDE_CODE, SUM, WEATHER, call, run
from tests.support.fake_ranks import RunningScript
from tests.support.servers import KEY

anthropic = pytest.importorskip("anthropic")
TOOLS: Any = [
    {
        "name": tool["function"]["name"],
        "description": tool["function"].get("description", "x"),
        "input_schema": tool["function"]["parameters"],
        "cache_control": {"type": "ephemeral"},
    }
    for tool in (WEATHER, SUM)
]
UNIQUE = {
    "name": "f",
    "input_schema": {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}},
}
USER = {"role": "user", "content": "hi"}


@pytest.fixture
def client(scripted: RunningScript) -> Any:
    return anthropic.Anthropic(base_url=scripted.url, api_key=KEY, max_retries=0, timeout=60)


def ask(client: Any, **fields: Any) -> Any:
    return client.messages.create(**{"model": "scripted", "messages": [USER], "max_tokens": 500, **fields})


def kinds(message: Any) -> list[str]:
    return [block.type for block in message.content]


def test_a_text_with_thinking(client: Any, scripted: RunningScript) -> None:
    message = ask(client, extra_body={"temperature": 0.5, "top_k": 7, "top_p": 0.9})
    assert (kinds(message), message.stop_reason, message.role) == (["thinking", "text"], "end_turn", "assistant")
    assert (message.content[0].thinking, message.content[1].text) == ("so so", "hello you")
    assert message.usage.output_tokens == scripted.num_tokens("so so</think>hello<|pad|> you<|end|>")
    assert message.usage.input_tokens == scripted.num_tokens(scripted.prompt)
    params = scripted.latest.params
    assert (params.temperature, params.top_k, params.top_p, params.max_new_tokens) == (0.5, 7, 0.9, 500)
    plain = ask(client, thinking={"type": "disabled"})
    assert (kinds(plain), plain.content[0].text) == (["text"], "hello you")
    for thinking in ({"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}):
        ask(client, thinking=thinking)
        assert scripted.prompt.endswith("<think>")
    omitted = ask(client, thinking={"type": "adaptive", "display": "omitted"})
    assert (omitted.content[0].thinking, omitted.content[1].text) == ("", "hello you")
    counted = client.messages.count_tokens(model="scripted", messages=[USER])
    assert counted.input_tokens == message.usage.input_tokens


def test_ends(client: Any, scripted: RunningScript) -> None:
    cut = ask(client, max_tokens=2)
    assert (cut.stop_reason, cut.stop_sequence) == ("max_tokens", None)
    stopped = ask(client, stop_sequences=["zz", "lo"])
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[-1].text) == ("stop_sequence", "lo", "hel")
    ask(client, messages=[USER, {"role": "assistant", "content": "It is"}])
    assert scripted.prompt.endswith("<|assistant|>It is")


@pytest.mark.parametrize("streams", [False, True])
def test_an_agent_of_three_turns(client: Any, scripted: RunningScript, streams: bool) -> None:
    """It sends back all blocks, as Claude Code does, which marks blocks for the cache."""
    system = [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    for _ in range(3):
        fields = {"model": "scripted", "max_tokens": 500, "system": system, "tools": TOOLS, "messages": messages}
        if streams:
            with client.messages.stream(**fields) as stream:
                message = stream.get_final_message()
        else:
            message = client.messages.create(**fields)
        messages.append({"role": "assistant", "content": message.content})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": run(block.name, block.input)}
            for block in message.content
            if block.type == "tool_use"
        ]
        if not results:
            break
        messages.append({"role": "user", "content": results})
    assert message.content[-1].text == "It is 23."
    prompt = scripted.prompt
    calls = (call("weather", city="Bärlin") + call("weather", city="Rome")).replace("\\u00e4", "ä")
    assert f"<|system|>Be short.<|end|><|user|>hi<|end|><|assistant|><think>two cities</think>I look. {calls}" in prompt
    assert f"<|assistant|><think>now add</think>{call('add', a=3, b=20)}<|end|><|tool|>23" in prompt


def test_results_with_texts_around_them(client: Any, scripted: RunningScript) -> None:
    use = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "r"}], "is_error": True}
    text = {"type": "text", "text": "go on"}
    hidden = {"type": "redacted_thinking", "data": "x"}
    messages = [USER, {"role": "assistant", "content": [hidden, use]}, {"role": "user", "content": [result, text]}]
    ask(client, messages=messages)
    assert "<|tool|>r [t1]<|end|><|user|>go on<|end|>" in scripted.prompt


def test_what_is_refused(client: Any, scripted: RunningScript) -> None:
    use = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a"}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("messages.0.content.0.image is not supported here", {"messages": [{"role": "user", "content": [image]}]}),
        (
            "messages.0.content.0.tool_result.content.0.image is not supported here",
            {"messages": [{"role": "user", "content": [{**result, "content": [image]}]}]},
        ),
        ("tools.0: type 5", {"tools": [{"type": 5, "name": "bash"}]}),
        ("tools.0.name", {"tools": [WEATHER]}),
        ("tool_choice", {"tools": [{"type": "bash_20250124", "name": "bash"}], "tool_choice": {"type": "any"}}),
        ("tool_choice", {"tool_choice": {"type": "any"}}),
        ("tool_choice names", {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}),
        ("tools.0.input_schema.properties.a: ", {"tools": [UNIQUE], "tool_choice": {"type": "any"}}),
        ("output_config.format.schema", {"output_config": {"format": {"type": "json_schema"}}}),
        (
            "output_config.format.schema: ",
            {"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
        ),
        ("context_management", {"extra_body": {"context_management": {"edits": [{"type": "clear_tool_uses"}]}}}),
        ("max_tokens", {"max_tokens": 0}),
        ("tool_use without a tool_result", {"messages": [{"role": "assistant", "content": [use]}]}),
    ]
    for words, fields in wrong:
        with pytest.raises(anthropic.BadRequestError) as refused:
            ask(client, **fields)
        assert refused.value.body["error"]["type"] == "invalid_request_error"
        assert words in refused.value.body["error"]["message"]
    none = ask(client, tools=TOOLS, tool_choice={"type": "none"}, metadata={"user_id": "u"}, service_tier="auto")
    assert "weather" not in scripted.prompt
    assert none.content[-1].text == "hello you"
    single = ask(client, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert kinds(single) == ["thinking", "text", "tool_use"]
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    ask(client, extra_body={"context_management": edits}, output_config={"effort": "high"})
    assert scripted.prompt.endswith("<think>")


def test_claude_code_with_all_its_settings(scripted: RunningScript) -> None:
    answered = httpx2.post(f"{scripted.url}/v1/messages", json=CLAUDE_CODE, headers={"x-api-key": KEY})
    assert (answered.status_code, answered.text.split()[-1]) == (200, '{"type":"message_stop"}'), answered.text
    prompt = scripted.prompt
    shown = "<|system|>You are Claude Code.\nBe short.<|end|><|user|>Fix it.<|end|><|system|><system-reminder>"
    assert shown in prompt
    assert all(name in prompt for name in ("Bash", "Edit", "Deferred"))
    assert "web_search" not in prompt
    assert "tool_search" not in prompt


@pytest.mark.parametrize("route", ["messages", "messages/count_tokens"])
def test_hashes_of_requests_are_no_part_of_prompts(scripted: RunningScript, route: str) -> None:
    """Claude Code's first block has another hash in each request, and proxies join it with the next by a line's end."""
    system, headers = CLAUDE_CODE["system"], {"x-api-key": KEY}

    def answer_to(system: Any, first: Any = ()) -> Any:
        messages = [*first, USER]
        fields = {"max_tokens": 9} if route == "messages" else {}
        body = {"messages": messages, "system": system, **fields}
        answered = httpx2.post(f"{scripted.url}/v1/{route}", json=body, headers=headers)
        assert answered.status_code == 200, answered.text
        usage = answered.json().get("usage") or answered.json()
        return usage["input_tokens"]

    plain = answer_to("You are Claude Code.\nBe short.")
    joined = system[0]["text"] + "\n" + "You are Claude Code.\nBe short."
    for each in (system, joined, [{"type": "text", "text": joined}]):
        assert answer_to(each) == plain
    alone = answer_to(system[:1])
    assert alone == answer_to([]) == answer_to([], [{"role": "system", "content": system[:1]}])


def test_formats_and_required_calls_have_grammars(client: Any, scripted: RunningScript) -> None:
    form = {"type": "json_schema", "schema": {"type": "object", "additionalProperties": False}}
    fields: list[dict[str, Any]] = [
        {"output_config": {"format": form}},
        {"extra_body": {"output_format": form}},
        {"tools": TOOLS, "tool_choice": {"type": "any"}},
        {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "weather"}},
        {"tools": [{**TOOLS[0], "strict": True}]},
    ]
    texts = set()
    for each in fields:
        answered = ask(client, **each)
        grammar = scripted.latest.params.grammar
        assert grammar is not None
        assert grammar.starts_after
        texts.add(grammar.text)
        assert (answered.stop_reason == "tool_use") is ("tools" in each)
    assert len(texts) == 4


def test_keys_and_errors(client: Any, scripted: RunningScript, mute: RunningScript) -> None:
    stranger = anthropic.Anthropic(base_url=scripted.url, api_key="wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError) as refused:
        ask(stranger)
    assert refused.value.body["error"]["type"] == "authentication_error"
    bearer = anthropic.Anthropic(base_url=scripted.url, auth_token=KEY, api_key=None, max_retries=0)
    assert kinds(ask(bearer)) == ["thinking", "text"]
    with pytest.raises(anthropic.NotFoundError) as missing:
        ask(client, model="other")
    assert missing.value.body["error"]["type"] == "not_found_error"
    wrong = httpx2.get(f"{scripted.url}/v1/messages", headers={"x-api-key": KEY})
    assert (wrong.status_code, wrong.json()["type"]) == (405, "error")
    late = anthropic.Anthropic(base_url=mute.url, api_key=KEY, max_retries=0)
    with pytest.raises(anthropic.APIStatusError, match="--request-timeout"):
        list(ask(late, stream=True))
