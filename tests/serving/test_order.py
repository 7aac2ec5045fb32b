"""Reasoning, texts and calls reach clients in the order in which the model wrote them, whatever an output has."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpmla.serving.anthropic_body import MessagesBody
from dcpmla.serving.anthropic_reply import MessagesReply
from dcpmla.serving.chat.encodings import find_encoding
from dcpmla.serving.chat.formats import FORMATS
from dcpmla.serving.chat_answers import ChatAnswers
from dcpmla.serving.chat_body import ChatBody
from dcpmla.serving.messages import Output
from dcpmla.serving.prompts import Prompt
from dcpmla.serving.reader import AnswerReader, HiddenTokens
from dcpmla.serving.replies import Reply, event
from dcpmla.serving.responses_body import ResponsesBody
from dcpmla.serving.responses_reply import ResponsesReply
from dcpmla.serving.slices import slices
from tests.serving.chat.answers import KINDS, TEMPLATES, Call, cut, parser_of, render, some_calls
from tests.support.agent import WEATHER
from tests.support.examples import few
from tests.support.whole_answers import whole_of

HIDDEN = "<|pad|>"
Blocks = list[tuple[str, Any]]  # (kind, text, or name and arguments)
WORDS = st.text(st.characters(exclude_categories=("Cs", "Z", "Cc"), exclude_characters="[]"), min_size=1, max_size=9)
# Texts begin and end with letters: white space beside markup belongs to the format.
PARTS = st.lists(WORDS | st.sampled_from(["</", "<|", "\n\n", " <tool", HIDDEN]), max_size=4)
TEXTS = PARTS.map(lambda parts: f"a{''.join(parts)}z")
USER = {"role": "user", "content": "x"}
BODY: dict[str, Any] = {"model": "m", "messages": [USER], "max_tokens": 9}


def sections_of(name: str, reasoning: str, sections: Sequence[tuple[str, list[Call]]]) -> str:
    """Return an answer with texts and calls in turns, as a format writes each of the two."""
    markup = FORMATS[name]
    first, *others = [render(TEMPLATES[name], reasoning, text, calls) for text, calls in sections]
    rest = [each.split(markup.reasoning[1], 1)[1].removeprefix(markup.after_reasoning) for each in others]
    return "".join([first, *rest])


def outputs_of(answer: str, sizes: list[int]) -> list[Output]:
    outputs = [Output(0, text, (1,)) for text in cut(answer, sizes)]
    return [*outputs[:-1], outputs[-1]._replace(finish_reason="stop")]


def streamed(reply: Reply, outputs: list[Output]) -> str:
    chunks = [*reply.first_chunks(), *(chunk for each in outputs for chunk in reply.chunks(0, each))]
    return "".join(text for chunk in [*chunks, *reply.last_chunks()] for text in event(chunk)) + reply.ending


def client_of(kind: type, text: str, is_stream: bool) -> Any:
    """Return a client whose server answers with a text."""
    content_type = "text/event-stream" if is_stream else "application/json"

    def answered(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, headers={"content-type": content_type}, text=text)

    http_client = httpx2.Client(transport=httpx2.MockTransport(answered))
    return kind(api_key="k", base_url="http://server/v1", http_client=http_client)


def of_messages(client: Any, streams: bool, **body: Any) -> Blocks:
    """Return the blocks that Anthropic's client reads."""
    if streams:
        with client.messages.stream(**body) as stream:
            message = stream.get_final_message()
        events = [event for event in client.messages.create(**body, stream=True) if event.type != "ping"]
        names = [event.type for event in events if event.type != "content_block_delta"]
        blocks_alone = ["content_block_start", "content_block_stop"] * len(message.content)
        assert names == ["message_start", *blocks_alone, "message_delta", "message_stop"]
        assert events[-2].usage.output_tokens == message.usage.output_tokens
    else:
        message = client.messages.create(**body)
    blocks: Blocks = []
    for block in message.content:
        if block.type == "tool_use":
            assert block.id
            blocks.append(("call", (block.name, block.input)))
        else:
            blocks.append(("text", block.text) if block.type == "text" else ("reasoning", block.thinking))
    return blocks


ITEMS = ("added", "done")
PART = ("output_item.added", "content_part.added", "NAME.done", "content_part.done", "output_item.done")
EVENTS = {  # of an item
    "reasoning": [name.replace("NAME", "reasoning_text") for name in PART],
    "message": [name.replace("NAME", "output_text") for name in PART],
    "function_call": ["output_item.added", "function_call_arguments.done", "output_item.done"],
}


def of_responses(client: Any, streams: bool, **body: Any) -> Blocks:
    """Return the blocks that OpenAI's client reads from items; a stream's events agree with the items at its end."""
    done = client.responses.create(**body, stream=streams)
    if streams:
        events = list(done)
        added, ended = ([each.item for each in events if each.type == f"response.output_item.{name}"] for name in ITEMS)
        done = events[-1].response
        assert [(item.id, item.type) for item in added] == [(item.id, item.type) for item in done.output]
        assert [item.model_dump() for item in ended] == [item.model_dump() for item in done.output]
        assert [each.sequence_number for each in events] == list(range(len(events)))
        names = [each.type.removeprefix("response.") for each in events if not each.type.endswith("delta")]
        of_items = [name for item in done.output for name in EVENTS[item.type]]
        assert names == ["created", "in_progress", *of_items, "completed"]
        for number, item in enumerate(done.output):
            deltas = [each.delta for each in events if "delta" in each.type and each.output_index == number]
            assert "".join(deltas) == (item.arguments if item.type == "function_call" else item.content[0].text)
    blocks: Blocks = []
    for item in done.output:
        if item.type == "function_call":
            assert item.call_id
            blocks.append(("call", (item.name, json.loads(item.arguments))))
        else:
            blocks.append(("text" if item.type == "message" else "reasoning", item.content[0].text))
    return blocks


def of_chat(client: Any, streams: bool, **body: Any) -> Blocks:
    """Return reasoning, text and calls of a chat completion, which has no order of texts and calls."""
    done = client.chat.completions.create(**body, stream=streams)
    parts = [chunk.choices[0].delta for chunk in done if chunk.choices] if streams else [done.choices[0].message]
    calls: list[tuple[str, str]] = []
    for each in (each for part in parts for each in part.tool_calls or ()):
        if each.function.name:
            assert each.id
            calls.append((each.function.name, ""))
        calls[-1] = (calls[-1][0], calls[-1][1] + (each.function.arguments or ""))
    reasoning = "".join(getattr(part, "reasoning_content", None) or "" for part in parts)
    text = "".join(part.content or "" for part in parts)
    shown: Blocks = [(kind, text) for kind, text in (("reasoning", reasoning), ("text", text)) if text]
    return shown + [("call", (name, json.loads(arguments))) for name, arguments in calls]


ROUTES: dict[str, tuple[Any, Any, type, Callable[..., Blocks], dict[str, Any]]] = {
    "messages": (MessagesBody, MessagesReply, anthropic.Anthropic, of_messages, BODY),
    "responses": (ResponsesBody, ResponsesReply, openai.OpenAI, of_responses, {"model": "m", "input": "x"}),
    "chat": (ChatBody, ChatAnswers, openai.OpenAI, of_chat, BODY),
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", [*KINDS, "chained"])
@few
@given(data=st.data())
def test_blocks_come_as_they_were_written(name: str, route: str, data: st.DataObject) -> None:
    written = "glm47" if name == "chained" else name
    section = st.tuples(TEXTS | st.just(""), some_calls(written))
    reasoning, sections = data.draw(TEXTS), data.draw(st.lists(section, min_size=1, max_size=4))
    is_parallel = data.draw(st.booleans())
    answer = sections_of(written, reasoning, sections)
    wanted: Blocks = [("reasoning", reasoning.replace(HIDDEN, ""))]
    num_calls = 0
    for shown, calls in sections:
        text = shown.replace(HIDDEN, "")
        if text and wanted[-1][0] == "text":
            wanted[-1] = ("text", wanted[-1][1] + text)
        elif text:
            wanted.append(("text", text))
        for each in calls:
            if is_parallel or not num_calls:
                wanted.append(("call", (each["name"], each["arguments"])))
            num_calls += 1
    if route == "chat":
        texts = "".join(text for kind, text in wanted if kind == "text")
        calls_alone = [block for block in wanted if block[0] == "call"]
        wanted = [wanted[0], *([("text", texts)] if texts else []), *calls_alone]
    body_kind, make_reply, client_kind, blocks_of, body = ROUTES[route]

    def reply() -> Reply:
        if name == "chained":
            reasons = parser_of("glm47", parses_calls=False)
            parsers = [reasons, parser_of("glm47", parses_reasoning=False)]
        else:
            parsers = [parser_of(name)]
        reader = AnswerReader(parsers, HiddenTokens([HIDDEN]), is_parallel=is_parallel)
        made: Reply = make_reply(body_kind.model_validate(body), None, "m", [Prompt([1], "")], [reader])
        return made

    sizes = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    stream = client_of(client_kind, streamed(reply(), outputs_of(answer, sizes)), is_stream=True)
    assert blocks_of(stream, True, **body) == wanted
    value = whole_of(reply(), ((0, output) for output in outputs_of(answer, sizes)))
    whole = client_of(client_kind, "".join(slices(value)), is_stream=False)
    assert blocks_of(whole, False, **body) == wanted


def test_answers_are_sent_back_in_any_order() -> None:
    """DeepSeek-V3.2 takes results only behind the message with their calls: texts after calls must not come between."""
    use = {"type": "tool_use", "id": "t", "name": "weather", "input": {"city": "Rome"}}
    said, result = {"type": "text", "text": "Bye."}, {"type": "tool_result", "tool_use_id": "t", "content": "sun"}
    turns = [USER, {"role": "assistant", "content": [said, use, said]}, {"role": "user", "content": [result]}]
    claude = MessagesBody.model_validate({**BODY, "messages": turns}).conversation()
    call_item = {"type": "function_call", "call_id": "t", "name": "weather", "arguments": '{"city": "Rome"}'}
    item = {"role": "assistant", "content": "Bye."}
    output = {"type": "function_call_output", "call_id": "t", "output": "sun"}
    gpt = ResponsesBody.model_validate({"input": [USER, item, call_item, item, output]}).conversation()
    assert claude.messages == gpt.messages
    encoding = find_encoding("deepseek_v32", "")
    assert encoding is not None
    options: Any = {"thinking": False, "reasoning_effort": None, "continue_final_message": False}
    text = encoding.render(claude.messages, [WEATHER], add_generation_prompt=True, **options)
    assert "</think>Bye.Bye.\n\n<｜DSML｜function_calls>" in text
    assert text.endswith("<result>sun</result>\n</function_results>\n\n</think>")
