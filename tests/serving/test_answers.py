"""Numbers in answers that JSON does not have, and what conversations become, without a server."""

import asyncio
import json
import math
from typing import Any

import pytest

from dcpmla.runtime.request import TokenLogprobs
from dcpmla.serving.answers import Answers
from dcpmla.serving.background import Prepared
from dcpmla.serving.chat_answers import ChatAnswers
from dcpmla.serving.chat_body import ChatBody
from dcpmla.serving.chats import Chats
from dcpmla.serving.messages import Output, Started
from dcpmla.serving.prompts import Prompt
from dcpmla.serving.protocol import parse
from dcpmla.serving.reader import AnswerReader, HiddenTokens
from dcpmla.serving.replies import event
from dcpmla.serving.slices import slices
from tests.serving.test_texts import texts_of
from tests.support.small_tokenizers import tokenizer_of
from tests.support.whole_answers import body_of, whole_of

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
