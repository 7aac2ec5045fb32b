"""Tools and reasoning in chat completions, as OpenAI's client and LangChain's tool loop speak them, with a script."""

import json
from typing import Any

import openai
import pytest

from dcpmla.serving import tools as tools_module
from tests.support.agent import SUM, WEATHER, call, run
from tests.support.fake_ranks import RunningScript
from tests.support.servers import KEY

LIST = {"type": "array", "uniqueItems": True}
UNIQUE = {
    "type": "function",
    "function": {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {"a": LIST}}},
}


@pytest.fixture
def client(scripted: RunningScript) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{scripted.url}/v1", api_key=KEY, max_retries=0, timeout=60)


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    messages = fields.pop("messages", [{"role": "user", "content": "hi"}])
    return client.chat.completions.create(model="scripted", messages=messages, **fields)


def test_reasoning_is_apart_and_counted(client: openai.OpenAI, scripted: RunningScript) -> None:
    whole = ask(client)
    message = whole.choices[0].message
    assert (message.content, message.reasoning_content, message.reasoning) == ("hello you", "so so", "so so")
    assert (message.tool_calls, whole.choices[0].finish_reason) == (None, "stop")
    num_reasoning = scripted.num_tokens("so so</think>")
    assert whole.usage.completion_tokens_details.reasoning_tokens == num_reasoning
    assert whole.usage.completion_tokens == num_reasoning + scripted.num_tokens("hello<|pad|> you<|end|>")
    for step in (1, 3, 100):
        scripted.step = step
        streamed = list(ask(client, stream=True, stream_options={"include_usage": True}))
        deltas = [chunk.choices[0].delta for chunk in streamed[:-1]]
        assert "".join(delta.content or "" for delta in deltas) == "hello you"
        assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "so so"
        assert streamed[-1].usage == whole.usage
    scripted.step = 1


def test_reasoning_is_switched(client: openai.OpenAI, scripted: RunningScript) -> None:
    for fields in (
        {"reasoning_effort": "none"},
        {"extra_body": {"chat_template_kwargs": {"thinking": False}}},
        {"reasoning_effort": "high", "extra_body": {"chat_template_kwargs": {"thinking": False}}},
    ):
        plain = ask(client, **fields)
        assert scripted.prompt.endswith("</think>")
        assert plain.choices[0].message.content == "hello you"
        assert not hasattr(plain.choices[0].message, "reasoning")
        assert plain.usage.completion_tokens_details.reasoning_tokens == 0
    ask(client, reasoning_effort="high")
    assert scripted.prompt.endswith("<think>")
    hidden = ask(client, extra_body={"include_reasoning": False})
    assert not hasattr(hidden.choices[0].message, "reasoning")
    assert hidden.usage.completion_tokens_details.reasoning_tokens > 0


def calls_of(message: Any) -> list[tuple[str, str, Any]]:
    return [(each.type, each.function.name, json.loads(each.function.arguments)) for each in message.tool_calls]


def test_calls_whole_and_streamed(client: openai.OpenAI, scripted: RunningScript) -> None:
    whole = ask(client, tools=[WEATHER, SUM])
    choice = whole.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert (choice.message.content, choice.message.reasoning_content) == ("I look. ", "two cities")
    expected = [("function", "weather", {"city": "Bärlin"}), ("function", "weather", {"city": "Rome"})]
    assert calls_of(choice.message) == expected
    assert len({each.id for each in choice.message.tool_calls}) == 2
    for step in (1, 4):
        scripted.step = step
        with client.chat.completions.stream(
            model="scripted", messages=[{"role": "user", "content": "hi"}], tools=[WEATHER, SUM], n=2
        ) as stream:
            final = stream.get_final_completion()
        for streamed in final.choices:
            assert (streamed.finish_reason, streamed.message.content) == ("tool_calls", "I look. ")
            assert calls_of(streamed.message) == expected
    scripted.step = 1
    single = ask(client, tools=[WEATHER], parallel_tool_calls=False)
    assert len(single.choices[0].message.tool_calls) == 1


def test_an_agent_of_three_turns(client: openai.OpenAI, scripted: RunningScript) -> None:
    messages: list[Any] = [{"role": "developer", "content": "Be short."}, {"role": "user", "content": "hi"}]
    for _ in range(3):
        message = ask(client, messages=messages, tools=[WEATHER, SUM]).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for each in message.tool_calls or []:
            result = run(each.function.name, json.loads(each.function.arguments))
            messages.append({"role": "tool", "tool_call_id": each.id, "content": result})
    assert message.content == "It is 23."
    assert [len(each.get("tool_calls", [])) for each in messages if each["role"] == "assistant"] == [2, 1, 0]
    prompt = scripted.prompt
    assert "<|system|>Be short.<|end|>" in prompt  # the template knows no developer
    assert "<think>two cities</think>I look. " + call("weather", city="Bärlin") in prompt
    assert f"<|tool|>23 [{messages[-2]['tool_call_id']}]<|end|><|assistant|><think>" in prompt


def test_tool_choices_and_what_is_refused(client: openai.OpenAI, scripted: RunningScript) -> None:
    none = ask(client, tools=[WEATHER], tool_choice="none")
    assert "weather" not in scripted.prompt
    assert none.choices[0].message.content == "hello you"
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}),
        ("tool_choice", {"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}),
        ("tools.0", {"tools": [{"custom": {"name": "x"}}]}),
        ("tool_choice", {"tools": [{"type": "custom", "custom": {"name": "x"}}], "tool_choice": "required"}),
        ("tools.0.function", {"tools": [{"type": "function"}]}),
        ("tools.0.function.name", {"tools": [{"type": "function", "function": {"name": "a b"}}]}),
        ("tools.0.function.parameters", {"tools": [{"type": "function", "function": {"name": "a", "parameters": 1}}]}),
        ("tools.0.function.strict", {"tools": [{"type": "function", "function": {"name": "a", "strict": 1}}]}),
        ("tools.0.function.parameters.properties.a", {"tools": [UNIQUE], "tool_choice": "required"}),
        ("ignore_eos", {"tools": [WEATHER], "tool_choice": "required", "extra_body": {"ignore_eos": True}}),
        ("tools", {"tools": 5}),
        ("messages", {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}),
        ("reasoning_effort", {"reasoning_effort": ""}),
    ]
    for param, fields in wrong:
        with pytest.raises(openai.BadRequestError) as refused:
            ask(client, **fields)
        assert refused.value.param == param, fields


def test_log_probabilities_stops_and_special_tokens(client: openai.OpenAI, scripted: RunningScript) -> None:
    whole = ask(client, logprobs=True, top_logprobs=1, n=2)
    for choice in whole.choices:
        text = "".join(entry.token for entry in choice.logprobs.content)
        assert text == "so so</think>hello<|pad|> you<|end|>"
    streamed = [chunk.choices[0] for chunk in ask(client, logprobs=True, stream=True)]
    entries = [entry.token for choice in streamed if choice.logprobs for entry in choice.logprobs.content]
    assert "".join(entries) == text
    shown = ask(client, extra_body={"skip_special_tokens": False})
    assert shown.choices[0].message.content == "hello<|pad|> you"
    stopped = ask(client, stop=["lo"])
    assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == ("hel", "stop")
    short = ask(client, max_tokens=2)
    assert (short.choices[0].message.content, short.choices[0].finish_reason) == ("", "length")
    assert "so so".startswith(short.choices[0].message.reasoning)
    continued = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "abc"}]
    ask(client, messages=continued, extra_body={"continue_final_message": True})
    assert scripted.prompt.endswith("<|assistant|>abc")


def test_required_and_strict_calls_have_grammars(client: openai.OpenAI, scripted: RunningScript) -> None:
    """They begin after the reasoning. Other requests have none."""
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    named = {"type": "function", "function": {"name": "weather"}}
    end = scripted.tokenizer.convert_tokens_to_ids("</think>")
    texts = []
    for fields in ({"tool_choice": "required"}, {"tool_choice": named}, {"tools": [strict, SUM]}):
        answered = ask(client, **{"tools": [WEATHER, SUM], **fields}).choices[0]
        assert answered.finish_reason == "tool_calls"
        grammar = scripted.latest.params.grammar
        assert grammar is not None
        assert grammar.starts_after == (end,)
        assert ("add" in grammar.text) is (fields.get("tool_choice") != named)
        texts.append(grammar.text)
        assert '"strict"' not in scripted.prompt
    assert len(set(texts)) == 3
    ask(client, tools=[WEATHER, SUM], tool_choice="required", reasoning_effort="none")
    assert scripted.latest.params.grammar.starts_after == ()
    ask(client, tools=[WEATHER, SUM])
    assert scripted.latest.params.grammar is None


def test_langchain_s_loop(scripted: RunningScript) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    from langchain_core.messages import HumanMessage, ToolMessage

    model = langchain_openai.ChatOpenAI(
        model="scripted", base_url=f"{scripted.url}/v1", api_key=KEY, max_retries=0
    ).bind_tools([WEATHER, SUM])
    for streams in (False, True):
        messages: list[Any] = [HumanMessage("hi")]
        while True:
            if streams:
                message, *chunks = model.stream(messages)
                for chunk in chunks:
                    message += chunk
            else:
                message = model.invoke(messages)
            messages.append(message)
            if not message.tool_calls:
                break
            for each in message.tool_calls:
                messages.append(ToolMessage(run(each["name"], each["args"]), tool_call_id=each["id"]))
        assert message.content == "It is 23."
        assert len(messages) == 7


def test_tools_that_are_left_out_are_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tools_module, "_logged", set())
    hosted = [{"type": "web_search"}, {"type": "custom", "name": "patch"}, {"type": "web_search"}]
    kinds = [{"type": f"kind {number}\n" + "x" * 999} for number in range(100)]
    tools = tools_module.by_path([*hosted, WEATHER, *kinds])
    for _ in range(2):
        assert [*tools_module.tool_use(tools, "function.parameters").tools] == [WEATHER]
    lines = [record.getMessage() for record in caplog.records]
    assert [sum(f"type {name!r}" in line for line in lines) for name in ("web_search", "custom")] == [1, 1]
    assert len(lines) == 64
    assert all("\n" not in line and len(line) < 250 for line in lines)
