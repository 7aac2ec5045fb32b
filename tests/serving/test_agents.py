"""Requests that agents send, recorded and shortened (`agents/`), over HTTP, with answers that official clients parse.

A file has the requests of one version of an agent, as it sent them to a server with this project's settings of
docs/agents.md: all fields and headers, some of the tools, and texts of ours in place of long ones. `refused` is the
beginning of the error of a request that must be refused.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from anthropic.types import RawMessageStreamEvent
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import ResponseStreamEvent

from tests.support.agent import TEMPLATE, call
from tests.support.fake_ranks import RunningScript
from tests.support.servers import AUTHORIZED, KEY, NEEDLE, RunningServer, serve
from tests.support.small_tokenizers import scripted_tokenizer

RECORDED = {
    f"{path.stem}: {request['about']}": request
    for path in sorted(Path(__file__).with_name("agents").glob("*.json"))
    for request in json.loads(path.read_text())["requests"]
}
TAKEN = [name for name, request in RECORDED.items() if "refused" not in request]
STREAMED = [name for name in TAKEN if RECORDED[name]["body"].get("stream")]
LIMITS = {"/v1/messages": "max_tokens", "/v1/chat/completions": "max_tokens", "/v1/responses": "max_output_tokens"}


@pytest.fixture(scope="module")
def needle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Serve the needle model, with a template that shows tools and an engine on one rank."""
    directory = tmp_path_factory.mktemp("needle")
    template = directory / "template.jinja"
    template.write_text(TEMPLATE)
    options = ["--chat-template", template, "--tool-call-parser", "deepseek_v3", "--max-model-len", 4096]
    with serve(directory, NEEDLE, 1, *options, "--api-key", KEY, "--served-model-name", "scripted") as running:
        yield running


def events_of(url: str, request: dict[str, Any], **changed: Any) -> list[Any]:
    """Send a request as it is, and return the events of its stream as the client of its API parses them."""
    path, options = request["path"], {"headers": request["headers"]}
    body = {**request["body"], **changed}
    if path.startswith("/v1/messages"):
        client = anthropic.Anthropic(base_url=url, auth_token=KEY, api_key=None, max_retries=0, timeout=60)
        kind: Any = anthropic.Stream[RawMessageStreamEvent]
        return list(client.post(path, body=body, options=options, cast_to=object, stream=True, stream_cls=kind))
    other = openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=60)
    kind = openai.Stream[ResponseStreamEvent if "responses" in path else ChatCompletionChunk]  # type: ignore[misc]
    return list(other.post(path, body=body, options=options, cast_to=object, stream=True, stream_cls=kind))


def is_whole(path: str, events: list[Any]) -> bool:
    """Return whether a stream has its first and last event, and every event has its type."""
    if "chat" in path:
        reasons = [choice.finish_reason for event in events for choice in event.choices]
        return bool(reasons[-1]) and all(isinstance(event, ChatCompletionChunk) for event in events)
    types = [event.type for event in events]
    if "responses" in path:
        ends = "response.completed", "response.incomplete"
        return types[0] == "response.created" and types[-1] in ends and types.count("response.created") == 1
    return (types[0], types[-1], types[-2]) == ("message_start", "message_stop", "message_delta")


@pytest.mark.parametrize("name", STREAMED)
def test_a_request_is_answered_with_a_stream_that_the_client_parses(scripted: RunningScript, name: str) -> None:
    events = events_of(scripted.url, RECORDED[name])
    assert is_whole(RECORDED[name]["path"], events), events


@pytest.mark.parametrize("name", [name for name in STREAMED if "json_schema" not in json.dumps(RECORDED[name])])
def test_an_engine_answers_as_well(needle: RunningServer, name: str) -> None:
    """The model knows neither the words nor the markup; requests of structured output need a tokenizer of bytes."""
    path = RECORDED[name]["path"].partition("?")[0]
    events = events_of(needle.url, RECORDED[name], **{LIMITS[path]: 4})
    assert is_whole(path, events), events


@pytest.mark.parametrize("name", [name for name in TAKEN if name not in STREAMED])
def test_tokens_are_counted(scripted: RunningScript, name: str) -> None:
    request = RECORDED[name]
    answered = httpx2.post(scripted.url + request["path"], json=request["body"], headers=AUTHORIZED)
    assert answered.status_code == 200, answered.text
    assert answered.json()["input_tokens"] > 10


@pytest.mark.parametrize("name", [name for name in RECORDED if name not in TAKEN])
def test_an_image_is_refused_with_its_place(scripted: RunningScript, name: str) -> None:
    """By the place Claude Code finds the image, and asks again without it."""
    request = RECORDED[name]
    answered = httpx2.post(scripted.url + request["path"], json=request["body"], headers=AUTHORIZED)
    assert answered.status_code == 400
    assert answered.json()["error"]["message"].startswith(request["refused"])


def test_a_tool_that_was_found_is_defined_where_it_was_found(scripted: RunningScript) -> None:
    """Deferred tools are no part of the list of tools, so finding one changes nothing before its definition."""
    found = RECORDED["claude_code: after a search of deferred tools"]
    events_of(scripted.url, found, messages=found["body"]["messages"][:2])
    before = scripted.prompt
    events_of(scripted.url, found)
    after = scripted.prompt
    assert '"name": "Agent"' in before
    assert "DeferredToolPlaceholder" not in before
    listing = before[: before.index("<|user|>")]
    assert after.startswith(listing)
    assert '<function>{"description": "words", "name": "WebFetch", "parameters": {' in after[len(listing) :]
    unknown = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "tool_reference", "tool_name": "Gone"}]}
    messages = [{"role": "user", "content": "hi"}, {"role": "user", "content": [unknown]}]
    body = {**found["body"], "messages": messages}
    refused = httpx2.post(scripted.url + found["path"], json=body, headers=AUTHORIZED)
    assert (refused.status_code, "tool_name is 'Gone'" in refused.text) == (400, True)
    searched = [*found["body"]["tools"], {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"}]
    events_of(scripted.url, found, tools=searched)
    assert "DeferredToolPlaceholder" in scripted.prompt, "no tool of the client finds it"


def test_a_hidden_reasoning_comes_back_to_the_model(scripted: RunningScript) -> None:
    """Claude Code hides reasoning (`display: omitted`), and sends its blocks back with the results of tools."""
    request = RECORDED["claude_code: first request"]
    assert request["body"]["thinking"]["display"] == "omitted"
    client = anthropic.Anthropic(base_url=scripted.url, api_key=KEY, max_retries=0, timeout=60)
    ask: dict[str, Any] = {"model": "scripted", "max_tokens": 500, "thinking": request["body"]["thinking"]}
    question = {"role": "user", "content": "hi"}
    with client.messages.stream(messages=[question], **ask) as stream:
        message = stream.get_final_message()
    assert message.content[0] == client.messages.create(messages=[question], **ask).content[0]
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[0].thinking == ""
    history = [question, {"role": "assistant", "content": message.content}, question]
    client.messages.create(messages=history, **ask)
    assert "<|assistant|><think>so so</think>hello you" in scripted.prompt
    for signature in ("another server's", "text:!", "text:/w=="):
        block = {"type": "thinking", "thinking": "", "signature": signature}
        answer = {"role": "assistant", "content": [block, {"type": "text", "text": "hello"}]}
        client.messages.create(messages=[question, answer, question], **ask)
        assert "<|assistant|>hello" in scripted.prompt


PATCH = "*** Begin Patch\n*** Add File: a\n+hello\n*** End Patch\n"


def calling(prompt: str) -> str:
    """Call Codex's custom tool, then a tool in a namespace, then one that gets no JSON, then answer."""
    calls = [call("apply_patch", input=PATCH), call("mcp__docs__find", word="x"), call("apply_patch", other=1)]
    return "</think>" + [*calls, "done"][prompt.count("<|tool|>")]


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningScript]:
    running = RunningScript(scripted_tokenizer(TEMPLATE), calling, tmp_path_factory.mktemp("caller"))
    yield running
    running.close()


@pytest.mark.parametrize("streams", [False, True])
def test_custom_tools_and_tools_in_namespaces(caller: RunningScript, streams: bool) -> None:
    """Codex has apply_patch, whose input is a text, and its subagents and tools of MCP servers in namespaces."""
    body = RECORDED["codex: after a custom call and a call in a namespace"]["body"]
    client = openai.OpenAI(base_url=f"{caller.url}/v1", api_key=KEY, max_retries=0, timeout=60)
    items: list[Any] = [{"role": "user", "content": "hi"}]
    made: list[Any] = []
    for _ in range(4):
        fields: dict[str, Any] = {"model": "scripted", "input": items, "tools": body["tools"]}
        if streams:
            with client.responses.stream(**fields) as stream:
                kinds = [event.type for event in stream]
                response = stream.get_final_response()
            assert kinds[-1] == "response.completed"
        else:
            response = client.responses.create(**fields)
        item = response.output[-1]
        made.append(item)
        if item.type == "message":
            break
        kind = "custom_tool_call_output" if item.type == "custom_tool_call" else "function_call_output"
        items += [item.to_dict(), {"type": kind, "call_id": item.call_id, "output": "made"}]
    assert [item.type for item in made] == ["custom_tool_call", "function_call", "custom_tool_call", "message"]
    assert (made[0].name, made[0].input, made[0].status) == ("apply_patch", PATCH, "completed")
    assert (made[1].name, made[1].namespace, made[1].arguments) == ("find", "mcp__docs", '{"word": "x"}')
    assert made[2].input == '{"other": 1}', "what is no input comes as it was written"
    assert caller.prompt.count("<tool_call>") == 3
    assert '{"name": "apply_patch", "arguments": {"input": ' in caller.prompt
    assert '{"name": "mcp__docs__find", "arguments": {"word": "x"}}' in caller.prompt
    assert "must follow this lark grammar" in caller.prompt


def test_events_of_a_custom_call(caller: RunningScript) -> None:
    tools = RECORDED["codex: after a custom call and a call in a namespace"]["body"]["tools"]
    request = {"path": "/v1/responses", "headers": {}, "body": {"model": "scripted", "input": "hi", "tools": tools}}
    events = {event.type: event for event in events_of(caller.url, request, stream=True)}
    assert not [name for name in events if "function_call" in name]
    assert events["response.custom_tool_call_input.delta"].delta == PATCH
    assert events["response.custom_tool_call_input.done"].input == PATCH
    assert events["response.output_item.added"].item.input == ""


def test_choices_and_faults_of_such_tools(caller: RunningScript) -> None:
    tools = RECORDED["codex: after a custom call and a call in a namespace"]["body"]["tools"]
    client = openai.OpenAI(base_url=f"{caller.url}/v1", api_key=KEY, max_retries=0, timeout=60)

    def ask(**fields: Any) -> Any:
        return client.responses.create(**{"model": "scripted", "input": "hi", "tools": tools, **fields})

    ask(tool_choice={"type": "custom", "name": "apply_patch"})
    grammar = caller.latest.params.grammar
    assert grammar is not None
    assert ("apply_patch" in grammar.text, "mcp__docs__find" in grammar.text) == (True, False)
    find = {"type": "function", "name": "find", "parameters": {}}
    wrong: list[tuple[str, Any]] = [
        ("tools.1.tools.0.name", [{**find, "name": "a__find"}, {"type": "namespace", "name": "a", "tools": [find]}]),
        ("tools.0.tools", [{"type": "namespace", "name": "a", "tools": [5]}]),
        ("tools.0.name", [{"type": "namespace", "tools": [find]}]),
        ("tools.0.tools.0.name", [{"type": "namespace", "name": "a", "tools": [{**find, "name": "b c"}]}]),
    ]
    for param, each in wrong:
        with pytest.raises(openai.BadRequestError) as refused:
            ask(tools=each)
        assert refused.value.param == param
    strict = {**find, "strict": True, "parameters": {"type": "object", "properties": {"a": {"not": {}}}}}
    with pytest.raises(openai.BadRequestError) as refused:
        ask(tools=[{"type": "web_search"}, {"type": "namespace", "name": "a", "tools": [strict]}])
    assert str(refused.value.param).startswith("tools.1.tools.0.parameters.properties.a")


def test_a_prompt_that_is_too_long_is_said_in_words_that_agents_know(scripted: RunningScript) -> None:
    """Claude Code and opencode read the words, Codex the code; then they shorten the conversation."""
    long, longest = "a " * 60_000, 100_000 - 1
    messages = [{"role": "user", "content": long}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/messages": {"messages": messages, "max_tokens": 10},
        "/v1/chat/completions": {"messages": messages},
        "/v1/responses": {"input": long},
    }
    for path, body in bodies.items():
        refused = httpx2.post(scripted.url + path, json=body, headers=AUTHORIZED, timeout=60)
        error = refused.json()["error"]
        number = int(error["message"].split()[4])
        assert refused.status_code == 400
        assert error["message"].startswith(f"prompt is too long: {number} tokens > {longest} maximum"), error
        assert number > longest
        if path != "/v1/messages":
            assert error["code"] == "context_length_exceeded"
    counted = httpx2.post(f"{scripted.url}/v1/messages/count_tokens", json={"messages": messages}, headers=AUTHORIZED)
    assert counted.json()["input_tokens"] == number
    tokens = httpx2.post(f"{scripted.url}/tokenize", json={"messages": messages}, headers=AUTHORIZED, timeout=60)
    assert tokens.json()["count"] == number


def test_clients_of_both_apis_list_the_model(scripted: RunningScript) -> None:
    anthropics = anthropic.Anthropic(base_url=scripted.url, auth_token=KEY, api_key=None, max_retries=0, timeout=60)
    openais = openai.OpenAI(base_url=f"{scripted.url}/v1", api_key=KEY, max_retries=0, timeout=60)
    for client in (anthropics, openais):
        assert [model.id for model in client.models.list()] == ["scripted"]
        assert client.models.retrieve("scripted").id == "scripted"
