"""OpenAI's API as its own client speaks it, against what the model gives in transformers, unsharded."""

from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import transformers

from tests.support.servers import KEY, MAX_MODEL_LEN, QUESTION, RunningServer

GREEDY = {"model": "needle", "temperature": 0}


@pytest.fixture
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def reference(model: Path) -> tuple[Any, Any]:
    """Load the model and its tokenizer with transformers."""
    whole = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return whole.eval(), transformers.AutoTokenizer.from_pretrained(model)


def logprobs_of(reference: tuple[Any, Any], text: str) -> tuple[list[int], torch.Tensor]:
    """Return a text's tokens, and log probabilities [len, vocab] of what comes after each."""
    model, tokenizer = reference
    ids = tokenizer(text)["input_ids"]
    with torch.no_grad():
        return ids, model(torch.tensor([ids])).logits[0].float().log_softmax(-1)


def test_a_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(prompt=QUESTION, max_tokens=3, **GREEDY)
    assert answer.choices[0].text == "123 123 123"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (9, 3, 12)
    stopped = client.completions.create(prompt=QUESTION, stop=["3 1"], **GREEDY).choices[0]
    assert (stopped.text, stopped.finish_reason) == ("12", "stop")


def test_prompts_of_all_kinds_and_several_choices(client: openai.OpenAI, reference: tuple[Any, Any]) -> None:
    ids = reference[1](QUESTION)["input_ids"]
    other = QUESTION.replace("ant?", "apple?")
    prompts: list[tuple[Any, list[str]]] = [
        (ids, ["123"]),
        ([QUESTION, other], ["123", "456"]),
        ([ids, ids], ["123", "123"]),
    ]
    for prompt, texts in prompts:
        answer = client.completions.create(prompt=prompt, max_tokens=1, **GREEDY)
        assert [choice.text for choice in answer.choices] == texts
    several = client.completions.create(prompt=[QUESTION, other], n=2, max_tokens=1, **GREEDY)
    assert [(choice.index, choice.text) for choice in several.choices] == [
        (0, "123"),
        (1, "123"),
        (2, "456"),
        (3, "456"),
    ]
    assert several.usage is not None
    assert several.usage.prompt_tokens == 18  # each prompt once
    hot = client.completions.create(prompt=QUESTION, model="needle", n=3, seed=5, temperature=30, max_tokens=8)
    again = client.completions.create(prompt=QUESTION, model="needle", n=3, seed=5, temperature=30, max_tokens=8)
    texts = [choice.text for choice in hot.choices]
    assert len(set(texts)) == 3
    assert texts == [choice.text for choice in again.choices]


def test_a_chat_streamed_and_whole(client: openai.OpenAI) -> None:
    messages: list[Any] = [
        {"role": "system", "content": "amber-ant 123; "},
        {"role": "user", "content": [{"type": "text", "text": "amber-apple 456; "}, {"type": "text", "text": "amber"}]},
        {"role": "user", "content": "-ant?"},
    ]
    whole = client.chat.completions.create(messages=messages, max_completion_tokens=2, **GREEDY)
    assert (whole.choices[0].message.role, whole.choices[0].message.content) == ("assistant", "123 123")
    chunks = list(client.chat.completions.create(messages=messages, max_tokens=2, stream=True, **GREEDY))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "123 123"
    assert chunks[-1].choices[0].finish_reason == "length"
    extra = {"chat_template_kwargs": {"suffix": " 7"}}
    longer = client.chat.completions.create(messages=messages, max_tokens=2, extra_body=extra, **GREEDY)
    assert whole.usage is not None
    assert longer.usage is not None
    assert longer.usage.prompt_tokens == whole.usage.prompt_tokens + 1
    extra = {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}
    with pytest.raises(openai.BadRequestError, match="chat_template is no variable"):
        client.chat.completions.create(messages=messages, extra_body=extra, **GREEDY)


def test_log_probabilities_are_the_model_s(client: openai.OpenAI, reference: tuple[Any, Any]) -> None:
    """Of new tokens, raw whatever the temperature, and in both shapes."""
    _, expected = logprobs_of(reference, QUESTION)
    best = expected[-1].topk(3)
    answer = client.completions.create(
        prompt=QUESTION, model="needle", temperature=3, top_p=0.01, max_tokens=1, logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == pytest.approx([best.values[0].item()], abs=1e-4)
    assert logprobs.top_logprobs is not None
    words = [reference[1].decode([token]) for token in best.indices.tolist()]
    assert logprobs.top_logprobs[0] == pytest.approx(dict(zip(words, best.values.tolist(), strict=True)), abs=1e-3)
    chat = client.chat.completions.create(
        messages=[{"role": "user", "content": QUESTION}], max_tokens=2, logprobs=True, top_logprobs=2, **GREEDY
    )
    assert chat.choices[0].logprobs is not None
    entries = chat.choices[0].logprobs.content or []
    assert [entry.token for entry in entries] == ["123", "123"]
    assert bytes(entries[0].bytes or []) == b"123"
    assert [len(entry.top_logprobs) for entry in entries] == [2, 2]
    assert entries[0].logprob == max(top.logprob for top in entries[0].top_logprobs)


def test_what_lm_eval_asks_for(client: openai.OpenAI, reference: tuple[Any, Any]) -> None:
    """Its `local-completions`: token ids of context and continuation, echoed with log probabilities, one token more.

    A second time: cached blocks of the prompt would have no logits.
    """
    context, text = QUESTION, QUESTION + "123; amber-bee 77; " * 24 + "amber-apple? 456"
    ids, expected = logprobs_of(reference, text)
    num_context = len(reference[1](context)["input_ids"])
    own = [expected[at, token].item() for at, token in enumerate(ids[1:])]
    for _ in range(2):
        answer = client.completions.create(
            prompt=[ids], max_tokens=1, logprobs=1, seed=1234, extra_body={"echo": True}, **GREEDY
        )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.token_logprobs is not None
        assert logprobs.top_logprobs is not None
        assert len(logprobs.token_logprobs) == len(ids) + 1
        assert logprobs.token_logprobs[0] is None
        assert logprobs.token_logprobs[1:-1] == pytest.approx(own, abs=2e-3)
        for at in range(num_context, len(ids)):  # as it finds out whether a token is the greedy one
            top = logprobs.top_logprobs[at]
            is_greedy = logprobs.token_logprobs[at] == max(top.values())
            assert is_greedy == (expected[at - 1].argmax() == ids[at]), at
    alone = client.completions.create(prompt=context, max_tokens=0, extra_body={"echo": True}, **GREEDY)
    assert alone.choices[0].text == context
    assert alone.usage is not None
    assert alone.usage.completion_tokens == 0


def test_penalties_reach_the_engine(client: openai.OpenAI) -> None:
    """The model repeats its answer; any of the penalties makes it stop that."""
    ask = {"prompt": QUESTION, "max_tokens": 4, **GREEDY}
    for penalty in ({"presence_penalty": 2}, {"frequency_penalty": 2}, {"extra_body": {"repetition_penalty": 1.5}}):
        assert client.completions.create(**ask, **penalty).choices[0].text  # type: ignore[call-overload]
    first = client.completions.create(**ask, extra_body={"repetition_penalty": 100.0})  # type: ignore[call-overload]
    assert "123" not in first.choices[0].text
    min_p = client.completions.create(prompt=QUESTION, model="needle", temperature=50, extra_body={"min_p": 1.0})
    assert min_p.choices[0].text.startswith("123 123 123")


def test_tokens_and_back(client: openai.OpenAI, server: RunningServer, reference: tuple[Any, Any]) -> None:
    def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
        return client.post(f"{server.url}{path}", body=body, cast_to=dict)  # type: ignore[type-var]

    ids = reference[1](QUESTION)["input_ids"]
    assert post("/tokenize", {"prompt": QUESTION}) == {"count": len(ids), "max_model_len": MAX_MODEL_LEN, "tokens": ids}
    assert post("/tokenize", {"prompt": QUESTION, "add_special_tokens": False})["tokens"] == ids[1:]
    messages = [{"role": "user", "content": QUESTION}]
    assert post("/tokenize", {"messages": messages})["tokens"] == ids[1:]
    assert post("/detokenize", {"tokens": ids[1:]})["prompt"] == reference[1].decode(ids[1:])
    (listed,) = client.models.list().data
    assert listed.id == "needle"
