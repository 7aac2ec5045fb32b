"""Prompts, tokens, offsets and numbers of the API, with small tokenizers and without a server."""

import asyncio
import json
import math
from array import array
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
from tests.support.small_tokenizers import FAMILIES, SENTENCES, SPECIAL, ids_of_bytes, tokenizer_of
from tests.support.whole_answers import body_of, whole_of
from tests.support.workers import worker_of


def texts_of(family: str, max_model_len: int = 1000) -> Texts:
    tokenizer = tokenizer_of(family)
    model = Started("", len(tokenizer), max_model_len, 4, max_model_len, no_grammars="not of all of them")
    return Texts(Background(Prepared(model, tokenizer), worker_of(tokenizer)))


def prompt_of(family: str, content: str | list[int]) -> Prompt:
    return asyncio.run(texts_of(family).prompt(content, wants_text=True))


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


@pytest.mark.parametrize(
    ("content", "of_prompt", "new", "stop", "of_answer"),
    [
        ("é:", ("é:", [0, 0, 1]), "日!".encode(), (), ("日!", [0, 0, 0, 1])),
        (ids_of_bytes(b"x\xf0\x9f"), ("x", [0, 1, 1]), b"\x8c\xb6!", (), ("🌶!", [0, 0, 1])),
        ("<eos>ab", ("<eos>ab", [0, 5, 6]), b"c", (), ("c", [0])),
        ("x", ("x", [0]), b"abcd", ("bcd",), ("a", [0, 1, 1, 1])),  # a stop string is not in the text
    ],
)
def test_offsets(
    content: str | list[int],
    of_prompt: tuple[str, list[int]],
    new: bytes,
    stop: tuple[str, ...],
    of_answer: tuple[str, list[int]],
) -> None:
    """In characters of several tokens; a prompt may end inside one. An echo begins with the prompt's."""
    prompt = prompt_of("straddling", content)
    assert (prompt.text, prompt.offsets) == of_prompt
    assert prompt_of("straddling", prompt.token_ids) == prompt
    echoed = of_prompt[0] + of_answer[0], of_prompt[1] + [len(of_prompt[0]) + offset for offset in of_answer[1]]
    for echo, expected in ((False, of_answer), (True, echoed)):
        answer = choice("straddling", prompt, ids_of_bytes(new), echo, stop)
        assert (answer["text"], answer["text_offset"]) == expected


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


def test_only_an_echo_needs_offsets() -> None:
    assert asyncio.run(texts_of("straddling").prompt([1, 2], wants_text=False)) == Prompt(array("i", [1, 2]), "")


@pytest.mark.usefixtures("_short_texts_are_long")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("adds_special", [False, True])
def test_tokens_are_those_of_the_tokenizer(family: str, adds_special: bool) -> None:
    """Of short texts in a thread, and of a long one in a child of the worker."""
    texts, tokenizer = texts_of(family, 200_000), tokenizer_of(family)
    for text in (*SENTENCES, f"a{SPECIAL[1]} b", "", f"{SENTENCES[0]}\n" * 2000):
        expected = tokenizer(text, add_special_tokens=adds_special)["input_ids"]
        assert asyncio.run(texts.encode([text], adds_special)).tolist() == expected


@pytest.mark.usefixtures("_short_texts_are_long")
def test_long_texts_and_prompts_of_many_tokens_go_through_a_child() -> None:
    """With the same offsets and text as short ones have."""
    texts = texts_of("straddling", 200_000)
    token_ids = ids_of_bytes(b"ab \xc3") * 20_000
    for content in (token_ids, "ab " * 30_000):
        prompt = asyncio.run(texts.prompt(content, wants_text=True))
        part = asyncio.run(texts.prompt(content[:3000], wants_text=True))
        assert prompt.text.startswith(part.text[:-1])
        assert prompt.offsets[:2900] == part.offsets[:2900]
    assert asyncio.run(texts.decode(token_ids)) == tokenizer_of("straddling").decode(token_ids)


def test_texts_that_no_vocabulary_makes_short_are_not_encoded() -> None:
    with pytest.raises(ApiError, match="prompt is too long: 64001 characters > 64000 maximum"):
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
