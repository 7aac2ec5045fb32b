"""Prompts, tokens, offsets and numbers of the API, with small tokenizers and without a server."""

import asyncio
import json
import math
from typing import Any

import pytest

from dcpmla.runtime.request import TokenLogprobs
from dcpmla.runtime.sampling import SamplingParams
from dcpmla.serving.answers import Answers
from dcpmla.serving.background import Background, Prepared
from dcpmla.serving.chat_answers import ChatAnswers
from dcpmla.serving.chat_body import ChatBody
from dcpmla.serving.chats import Chats
from dcpmla.serving.errors import ApiError
from dcpmla.serving.messages import Output, Started
from dcpmla.serving.prompts import Prompt, Texts
from dcpmla.serving.protocol import CompletionBody, parse
from dcpmla.serving.reader import AnswerReader, HiddenTokens
from dcpmla.serving.reading import RequestText
from dcpmla.serving.replies import event
from dcpmla.serving.slices import slices
from tests.support.small_tokenizers import FAMILIES, SENTENCES, SPECIAL, byte_letter, tokenizer_of
from tests.support.whole_answers import body_of, whole_of
from tests.support.workers import worker_of


def texts_of(family: str) -> Texts:
    tokenizer = tokenizer_of(family)
    prepared = Prepared(Started("", len(tokenizer), 1000, 4, 1000), tokenizer)
    return Texts(Background(prepared, worker_of(tokenizer)))


def prompt_of(family: str, content: str | list[int]) -> Prompt:
    return asyncio.run(texts_of(family).prompt(content, wants_text=True))


def ids_of_bytes(content: bytes) -> list[int]:
    letters = [byte_letter(byte) for byte in content]
    return list(tokenizer_of("straddling").convert_tokens_to_ids(letters))


def choice(family: str, prompt: Prompt, new: list[int], echo: bool, stop: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a choice, streamed token by token, after a check that it is the same in one piece."""
    texts = [RequestText(tokenizer_of(family), SamplingParams(stop=stop), prompt.token_ids) for _ in range(2)]
    body = CompletionBody(prompt="", echo=echo, logprobs=0)
    answers, whole = (Answers(body, texts_of(family), "m", [prompt]) for _ in range(2))
    scored = tuple(TokenLogprobs(token, -1.0, ()) for token in prompt.token_ids) if echo else ()
    joined: dict[str, Any] = {"text": "", "tokens": [], "text_offset": []}
    for number, token in enumerate(new):
        reason = "length" if number == len(new) - 1 else None
        logprobs: tuple[TokenLogprobs, ...] = (TokenLogprobs(token, -1.0, ()),)
        output = texts[0].read(Output(0, "", (token,), logprobs, reason, prompt_logprobs=() if number else scored))
        (chunk,) = json.loads("".join(slices(answers.chunks(0, output)[0])))["choices"]
        joined["text"] += chunk["text"]
        joined["tokens"] += chunk["logprobs"]["tokens"]
        joined["text_offset"] += chunk["logprobs"]["text_offset"]
    logprobs = tuple(TokenLogprobs(token, -1.0, ()) for token in new)
    output = texts[1].read(Output(0, "", tuple(new), logprobs, "length", prompt_logprobs=scored))
    (once,) = json.loads("".join(slices(whole_of(whole, [(0, output)]))))["choices"]
    assert once["text"] == joined["text"]
    length = len(once["text"])
    assert once["logprobs"]["text_offset"] == [min(offset, length) for offset in joined["text_offset"]]
    return {**joined, "text_offset": once["logprobs"]["text_offset"]}


@pytest.mark.parametrize("echo", [False, True])
def test_offsets_of_characters_of_several_tokens(echo: bool) -> None:
    new = ids_of_bytes("日!".encode())
    answer = choice("straddling", prompt_of("straddling", "é:"), new, echo)
    assert (answer["text"], answer["text_offset"]) == (
        ("é:日!", [0, 0, 1, 2, 2, 2, 3]) if echo else ("日!", [0, 0, 0, 1])
    )


@pytest.mark.parametrize("echo", [False, True])
def test_a_prompt_that_ends_inside_a_character(echo: bool) -> None:
    prompt = prompt_of("straddling", ids_of_bytes(b"x\xf0\x9f"))
    assert (prompt.text, prompt.offsets) == ("x", [0, 1, 1])
    answer = choice("straddling", prompt, ids_of_bytes(b"\x8c\xb6!"), echo)
    assert (answer["text"], answer["text_offset"]) == (("x🌶!", [0, 1, 1, 1, 1, 2]) if echo else ("🌶!", [0, 0, 1]))


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_first_spaces(echo: bool, as_ids: bool) -> None:
    tokenizer = tokenizer_of("metaspace")
    text, new = "the quick", tokenizer.encode("brown fox")
    prompt = prompt_of("metaspace", tokenizer.encode(text) if as_ids else text)
    answer = choice("metaspace", prompt, new, echo)
    assert answer["text"] == ("the quick brown fox" if echo else " brown fox")
    assert "".join(answer["tokens"][-len(new) :]) == " brown fox"
    for token, offset in zip(answer["tokens"][1:], answer["text_offset"][1:], strict=True):
        assert answer["text"][offset:].startswith(token)


def test_special_tokens_of_prompts() -> None:
    special = tokenizer_of("straddling").convert_tokens_to_ids(SPECIAL[1])
    prompt = prompt_of("straddling", [special, *ids_of_bytes(b"ab")])
    assert (prompt.text, prompt.offsets) == ("<eos>ab", [0, 5, 6])
    assert prompt_of("straddling", "<eos>ab") == prompt
    tokenizer = tokenizer_of("straddling")
    assert choice("straddling", prompt, tokenizer.encode("c"), echo=True)["text_offset"] == [0, 5, 6, 7]


def test_offsets_end_with_the_text() -> None:
    """A stop string is not in the text."""
    answer = choice("straddling", prompt_of("straddling", "x"), ids_of_bytes(b"abcd"), False, ("bcd",))
    assert (answer["text"], answer["text_offset"]) == ("a", [0, 1, 1, 1])


def test_only_an_echo_needs_offsets() -> None:
    assert asyncio.run(texts_of("straddling").prompt([1, 2], wants_text=False)) == Prompt([1, 2], "")


@pytest.fixture
def _short_texts_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcpmla.serving.background._SMALL", 1 << 14)


@pytest.mark.usefixtures("_short_texts_are_long")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("adds_special", [False, True])
def test_tokens_are_those_of_the_tokenizer(family: str, adds_special: bool) -> None:
    """Of short texts in a thread, and of a long one in a child of the worker."""
    texts, tokenizer = long_texts_of(family), tokenizer_of(family)
    for text in (*SENTENCES, f"a{SPECIAL[1]} b", "", f"{SENTENCES[0]}\n" * 2000):
        expected = tokenizer(text, add_special_tokens=adds_special)["input_ids"]
        assert asyncio.run(texts.encode([text], adds_special)) == expected


def long_texts_of(family: str) -> Texts:
    tokenizer = tokenizer_of(family)
    model = Started("", len(tokenizer), 200_000, 4, 200_000, no_grammars="not of all of them")
    return Texts(Background(Prepared(model, tokenizer), worker_of(tokenizer)))


@pytest.mark.usefixtures("_short_texts_are_long")
def test_long_texts_and_prompts_of_many_tokens_go_through_a_child() -> None:
    """With the same offsets and text as short ones have."""
    texts = long_texts_of("straddling")
    token_ids = ids_of_bytes(b"ab \xc3") * 20_000
    for content in (token_ids, "ab " * 30_000):
        prompt = asyncio.run(texts.prompt(content, wants_text=True))
        part = asyncio.run(texts.prompt(content[:3000], wants_text=True))
        assert prompt.text.startswith(part.text[:-1])
        assert prompt.offsets[:2900] == part.offsets[:2900]
    assert asyncio.run(texts.decode(token_ids)) == tokenizer_of("straddling").decode(token_ids)


def test_texts_that_no_vocabulary_makes_short_are_not_encoded() -> None:
    with pytest.raises(ApiError, match="the prompt has 64,001 characters; at most 64,000 are looked at"):
        asyncio.run(texts_of("straddling").encode(["x" * 64_001]))


SHOWN = {"logprobs": 2, "prompt_logprobs": 2, "return_token_ids": True}
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.reasoning_content %}!{% endif %};{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.mark.parametrize("kind", [Answers, ChatAnswers])
@pytest.mark.parametrize("value", [-math.inf, math.nan, -1e300, math.inf])
def test_no_number_is_outside_of_json(kind: Any, value: float) -> None:
    """As vLLM sends it; and json.dumps cannot raise in the middle of a stream."""
    entry = TokenLogprobs(5, value, ((5, value), (6, -0.5)))
    output = Output(0, "a", (5,), (entry,), "stop", prompt_logprobs=(TokenLogprobs(5, None, ()), entry))

    def answers() -> Any:
        readers = [AnswerReader([], HiddenTokens([]))]
        return kind(body_of(kind, **SHOWN), texts_of("straddling"), "m", [Prompt([5, 5], "ab", [0, 1])], readers)

    expected = 0.0 if value == math.inf else -9999.0
    (chunk,), whole = answers().chunks(0, output), whole_of(answers(), [(0, output)])
    for sent in (json.loads("".join(event(chunk)).removeprefix("data: ")), json.loads("".join(slices(whole)))):
        numbers = json.dumps(sent["choices"][0]["logprobs"])
        assert str(expected) in numbers
        assert "-0.5" in numbers
    with pytest.raises(ValueError, match="JSON"):
        list(event({"x": math.nan}))


def rendered(**fields: Any) -> str:
    """Return the text of the tokens that a chat begins with."""
    model = Prepared(Started("", 1000, 1000, 4, 1000), tokenizer_of("straddling"))
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
    body = parse(ChatBody, json.dumps({"messages": messages, **fields}).encode())
    prompt = asyncio.run(Chats(model, TEMPLATE).prompt(body.conversation()))
    return str(model.tokenizer.decode(prompt.token_ids))


def test_generation_prompts_and_continued_messages() -> None:
    answered, continued = "<user>ab;<assistant>cd;", "<user>ab;<assistant>cd"
    assert rendered() == rendered(add_generation_prompt=True) == answered + "<assistant>"
    assert rendered(add_generation_prompt=False) == answered
    assert rendered(continue_final_message=True) == continued
    assert rendered(continue_final_message=True, add_generation_prompt=False) == continued
    messages = [{"role": "assistant", "content": "cd", "reasoning_content": "x"}]
    assert rendered(messages=messages, add_generation_prompt=False) == "<assistant>cd!;"
