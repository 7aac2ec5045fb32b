"""Answers in slices: their bytes are those of the whole object, and the event loop runs between them."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from dcpmla.runtime.request import TokenLogprobs
from dcpmla.serving.answers import Answers
from dcpmla.serving.anthropic_body import MessagesBody
from dcpmla.serving.anthropic_reply import MessagesReply
from dcpmla.serving.background import Prepared
from dcpmla.serving.chat_answers import ChatAnswers
from dcpmla.serving.errors import ApiError
from dcpmla.serving.messages import Output
from dcpmla.serving.prompts import Prompt
from dcpmla.serving.reader import AnswerReader, HiddenTokens
from dcpmla.serving.replies import WholeAnswer, collect, event, events
from dcpmla.serving.responses_body import ResponsesBody
from dcpmla.serving.responses_reply import ResponsesReply
from dcpmla.serving.shown import Json
from dcpmla.serving.slices import MAX_ENTRIES, SLICE, Each, check_entries, slices
from tests.serving.test_client import make_api, make_engine
from tests.serving.test_texts import texts_of
from tests.support.asgi import Client
from tests.support.small_tokenizers import scripted_tokenizer
from tests.support.whole_answers import body_of, whole_of

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=30)
NUM_TOKENS = 3000
LARGEST = 2 * SLICE + 4096  # a slice, and the text or the item that ends it


def text_of(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def lazy(value: Any) -> Any:
    """Return a value with lists that are made when they are written."""
    if isinstance(value, dict):
        return {key: lazy(each) for key, each in value.items()}
    return Each(lambda each: each, value) if isinstance(value, list) else value


@given(VALUES)
def test_slices_are_the_whole_objects_json(value: object) -> None:
    assert "".join(slices(value)) == "".join(slices(lazy(value))) == text_of(value)


LONG = ['ä"\\\n' * SLICE, {"a": ["x" * (SLICE + 1)]}, list(range(SLICE)), Each(str, range(SLICE))]


@pytest.mark.parametrize("value", LONG)
def test_no_slice_is_large(value: Any) -> None:
    pieces = list(slices(value))
    assert len(pieces) > 1
    assert max(map(len, pieces)) < 8 * SLICE
    assert "".join(pieces) == text_of([*value] if isinstance(value, Each) else value)


def test_items_are_made_when_they_are_written() -> None:
    made: list[int] = []
    pieces = slices(Each(lambda number: made.append(number) or "x" * 100, range(100_000)))
    next(pieces)
    assert len(made) <= SLICE // 100 + 1


def test_a_deep_value_is_written() -> None:
    value: Any = []
    for _ in range(100_000):
        value = [value]
    assert "".join(slices(value)) == "[" * 100_001 + "]" * 100_001


def reply_of(kind: Any, num_choices: int, num_prompts: int = 1) -> Any:
    readers = [AnswerReader([], HiddenTokens([])) for _ in range(num_choices)] if kind is ChatAnswers else []
    body = body_of(kind, n=num_choices, logprobs=20, prompt_logprobs=20, return_token_ids=True)
    prompts = [Prompt([5] * NUM_TOKENS, "ab" * NUM_TOKENS, [0] * NUM_TOKENS) for _ in range(num_prompts)]
    return kind(body, texts_of("straddling"), "m", prompts, readers)


def output_of() -> Output:
    entry = TokenLogprobs(5, -1.0, tuple((token, -1.0) for token in range(5, 15)))
    entries = (entry,) * NUM_TOKENS
    return Output(0, "a" * NUM_TOKENS, (5,) * NUM_TOKENS, entries, "stop", prompt_logprobs=entries)


async def sent_by(app: Any) -> tuple[list[bytes], int, list[tuple[bytes, bytes]]]:
    """Return the pieces of an answer, how often another task ran meanwhile, and the headers."""
    pieces: list[bytes] = []
    headers: list[tuple[bytes, bytes]] = []
    num_turns = 0

    async def send(message: Any) -> None:
        headers.extend(message.get("headers", []))
        pieces.append(message.get("body", b""))

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def other() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    await app({}, receive, send)
    task.cancel()
    return [piece for piece in pieces if piece], num_turns, headers


def test_long_answers_are_read_as_they_come() -> None:
    """Reading the text of many tokens at the end would keep the event loop."""

    class Generation:
        indices = range(2)

        async def outputs(self) -> AsyncIterator[tuple[int, Output]]:
            for number in range(2000):
                yield number % 2, Output(0, "ab", (5,), finish_reason="stop" if number >= 1998 else None)

    reply, texts = reply_of(ChatAnswers, 2), list[int]()
    add = reply.add
    reply.add = lambda index, output: (texts.append(len(output.text)), add(index, output))
    whole = asyncio.run(collect(Generation(), reply))  # type: ignore[arg-type]
    assert max(texts) <= 512
    assert [choice["message"]["content"] for choice in whole["choices"]] == ["ab" * 1000] * 2


def blocks_of(reply: Any, body: Any) -> Json:
    """Return a whole answer of one long text."""
    made = reply(body, None, "m", [Prompt([5], "a")], [AnswerReader([], HiddenTokens([]))])
    reasons = [*[None] * 9, "stop"]
    return whole_of(made, [(0, output_of()._replace(text="a" * SLICE, finish_reason=reason)) for reason in reasons])


def choices_of(kind: Any, num_choices: int, num_prompts: int) -> Json:
    return whole_of(reply_of(kind, num_choices, num_prompts), enumerate([output_of()] * num_choices * num_prompts))


USER = {"role": "user", "content": "a"}
WHOLES: list[tuple[Callable[[], Json], int]] = [  # and the least number of bytes
    (partial(choices_of, Answers, 3, 1), 3 * NUM_TOKENS),
    (partial(choices_of, Answers, 1, 3), 3 * NUM_TOKENS),
    (partial(choices_of, ChatAnswers, 3, 1), 3 * NUM_TOKENS),
    (partial(blocks_of, MessagesReply, MessagesBody(messages=[USER], max_tokens=1)), 10 * SLICE),
    (partial(blocks_of, ResponsesReply, ResponsesBody(input="a")), 10 * SLICE),
]


@pytest.mark.parametrize(("make", "length"), WHOLES)
async def test_the_loop_runs_between_slices(make: Callable[[], Json], length: int) -> None:
    pieces, num_turns, headers = await sent_by(WholeAnswer(make()))
    assert num_turns >= len(pieces) >= 10
    assert max(map(len, pieces)) < LARGEST
    assert len(b"".join(pieces)) > length
    json.loads(b"".join(pieces))
    assert b"content-length" not in dict(headers)


def test_a_small_answer_has_its_length() -> None:
    pieces, _, headers = asyncio.run(sent_by(WholeAnswer({"a": "ä"})))
    assert pieces == ['{"a":"ä"}'.encode()]
    assert dict(headers)[b"content-length"] == b"10"


@pytest.mark.parametrize("kind", [Answers, ChatAnswers])
def test_the_events_of_an_output_are_cut(kind: Any) -> None:
    class Generation:
        async def outputs(self) -> AsyncIterator[tuple[int, Output]]:
            yield 0, output_of()

    async def read() -> list[str]:
        return [text async for text in events(Generation(), reply_of(kind, 1))]  # type: ignore[arg-type]

    pieces = asyncio.run(read())
    assert max(map(len, pieces)) < LARGEST
    for line in filter(None, "".join(pieces).split("\n\n")[:-2]):
        json.loads(line.removeprefix("data: "))


def test_an_event_has_a_name_once() -> None:
    chunk: Json = {"type": "x", "text": "a" * 3 * SLICE}
    assert "".join(event(chunk)) == f"event: x\ndata: {text_of(chunk)}\n\n"


@pytest.mark.parametrize(
    ("counts", "field"),
    [((MAX_ENTRIES + 1, 0, 0, None), "prompt_logprobs"), ((1, 0, MAX_ENTRIES // 2, 1), "logprobs")],
)
def test_an_answer_has_a_limit(counts: tuple[int, int | None, int, int | None], field: str) -> None:
    with pytest.raises(ApiError, match=f"{MAX_ENTRIES + 1:,}|{MAX_ENTRIES:,}") as raised:
        check_entries(*counts)
    assert (raised.value.status, raised.value.param) == (400, field)
    assert check_entries(MAX_ENTRIES // 4, 1, MAX_ENTRIES // 4, 1) == MAX_ENTRIES
    assert check_entries(1 << 40, None, 1 << 40, None) == 0


@pytest.mark.parametrize(("fields", "expected"), [
    ({"logprobs": True, "top_logprobs": 20}, MAX_ENTRIES // 21),
    ({"logprobs": True, "n": 2}, MAX_ENTRIES // 2),
    ({"logprobs": True, "top_logprobs": 20, "stream": True}, 1_999_999),
    ({}, 1_999_999),
])  # fmt: skip
def test_a_chat_without_a_limit_asks_for_no_more_than_is_served(fields: dict[str, Any], expected: int) -> None:
    """Streams are written as they come."""
    engine, wire = make_engine(max_num_seqs=5, max_model_len=2_000_000, num_cache_tokens=2_000_000)
    tokenizer = scripted_tokenizer("{% for m in messages %}a{% endfor %}")
    engine.prepared = Prepared(replace(engine.ready().model, vocab_size=len(tokenizer)), tokenizer)
    app = make_api(engine).app()

    async def ask() -> int:
        body = {"messages": [{"role": "user", "content": "a"}], **fields}
        client = Client(app, "/v1/chat/completions", json.dumps(body).encode())
        while not wire.commands:
            assert not client.task.done(), client.status
            await asyncio.sleep(0.001)
        await client.leave()
        return int(wire.commands[0].params.max_new_tokens)

    assert asyncio.run(ask()) in (expected, expected + 1)  # the prompt has a token or two
