"""Fields of clients over HTTP: vLLM's as well, other routes, and nothing that changes an answer is ignored."""

from typing import Any

import httpx2
import pytest
import transformers

import dcpmla
from tests.support.servers import MAX_MODEL_LEN, QUESTION, RunningServer, read_events

GREEDY = {"prompt": QUESTION, "max_tokens": 3, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 2, "temperature": 0}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def tokenizer(model: Any) -> Any:
    return transformers.AutoTokenizer.from_pretrained(model)


@pytest.fixture(scope="module")
def ids(tokenizer: Any) -> list[int]:
    return list(tokenizer(QUESTION)["input_ids"])


def ask(client: Any, path: str = COMPLETIONS, **fields: Any) -> Any:
    """Return an answer; the fields of a chunk in a list, if it is streamed."""
    response = client.post(path, json={**(GREEDY if path == COMPLETIONS else CHAT), **fields})
    assert response.status_code == 200, response.text
    return read_events(response.text.splitlines()) if fields.get("stream") else response.json()


def text(client: Any, **fields: Any) -> str:
    return str(ask(client, **fields)["choices"][0]["text"])


def test_biases_choose(client: Any, tokenizer: Any, ids: list[int]) -> None:
    other, best = (tokenizer.convert_tokens_to_ids(word) for word in ("456", "123"))
    assert text(client, logit_bias={str(other): 100}) == "456 456 456"
    assert "123" not in text(client, logit_bias={str(best): -100})
    whole = ask(client, logit_bias={str(other): 100}, logprobs=0)["choices"][0]
    assert whole["logprobs"]["token_logprobs"][0] < -1  # the model's own, without the bias


def test_min_tokens_and_stops(client: Any, tokenizer: Any) -> None:
    stop = tokenizer.convert_tokens_to_ids("123")
    assert text(client, stop_token_ids=[stop]) == ""
    first = text(client, stop_token_ids=[stop], min_tokens=1)
    assert first
    assert "123" not in first
    assert text(client, stop="23 1") == "1"
    assert text(client, stop="23 1", include_stop_str_in_output=True) == "123 1"
    assert text(client, stop="2", min_tokens=2) == "123 123 1"
    assert text(client, stop="") == "123 123 123"
    assert text(client, stop_token_ids=[stop], include_stop_str_in_output=True) == "123"
    special = tokenizer.bos_token
    bias = {str(tokenizer.bos_token_id): 100}
    assert special not in text(client, logit_bias=bias, ignore_eos=True)
    assert special in text(client, logit_bias=bias, ignore_eos=True, skip_special_tokens=False)


def test_lengths(client: Any, ids: list[int]) -> None:
    assert len(ask(client, return_token_ids=True, max_tokens=None)["choices"][0]["token_ids"]) == 16
    assert text(client, max_tokens=None, max_completion_tokens=2) == "123 123"
    assert text(client, max_tokens=3, max_completion_tokens=2) == "123 123"
    refused = client.post("/v1/completions", json={"prompt": ids, "max_tokens": 0})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")
    for num_more, code in ((0, "context_length_exceeded"), (-1, None)):
        asked = client.post("/v1/completions", json={"prompt": ids[-1:] * (MAX_MODEL_LEN + num_more), "max_tokens": 1})
        assert asked.json().get("error", {}).get("code") == code
    for kept in (3, "3"):
        answer = ask(client, truncate_prompt_tokens=kept, return_token_ids=True)
        assert answer["choices"][0]["prompt_token_ids"] == ids[-3:]
        assert answer["usage"]["prompt_tokens"] == 3
        chat = ask(client, CHATS, truncate_prompt_tokens=kept, return_token_ids=True)
        assert chat["prompt_token_ids"] == ids[-3:]
    long = ids[-1:] * (MAX_MODEL_LEN + 800)
    filled = ask(client, prompt=long, truncate_prompt_tokens=-1, max_tokens=5)["usage"]
    assert (filled["prompt_tokens"], filled["completion_tokens"]) == (MAX_MODEL_LEN - 5, 5)
    echoed = ask(client, truncate_prompt_tokens=2, echo=True, logprobs=0, max_tokens=1)["choices"][0]
    assert echoed["logprobs"]["text_offset"][0] == 0
    assert len(echoed["logprobs"]["tokens"]) == 3


def test_special_tokens_of_prompts(client: Any, ids: list[int]) -> None:
    for value, expected in ((None, ids), (True, ids), (False, ids[1:])):
        answer = ask(client, add_special_tokens=value, return_token_ids=True)
        assert answer["choices"][0]["prompt_token_ids"] == expected
    for value, expected in ((None, ids[1:]), (True, ids), (False, ids[1:])):
        assert ask(client, CHATS, add_special_tokens=value, return_token_ids=True)["prompt_token_ids"] == expected
        tokens = client.post("/tokenize", json={"messages": CHAT["messages"], "add_special_tokens": value}).json()
        assert tokens["tokens"] == expected
    echoed = ask(client, add_special_tokens=False, echo=True, logprobs=0)["choices"][0]["logprobs"]
    assert len(echoed["tokens"]) == len(echoed["text_offset"]) == len(ids) - 1 + 3


def test_token_ids_in_streams(client: Any, ids: list[int]) -> None:
    chunks = [chunk["choices"][0] for chunk in ask(client, stream=True, return_token_ids=True, n=1)]
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [ids] + [None] * (len(chunks) - 1)
    new: list[int] = sum((chunk["token_ids"] for chunk in chunks), [])
    assert new == ask(client, return_token_ids=True)["choices"][0]["token_ids"]
    chat = ask(client, CHATS, stream=True, return_token_ids=True)
    assert [chunk.get("prompt_token_ids") for chunk in chat] == [ids[1:]] + [None] * (len(chat) - 1)
    assert sum((chunk["choices"][0].get("token_ids", []) for chunk in chat), []) == new[:2]


def test_log_probabilities_of_prompts(client: Any, ids: list[int]) -> None:
    """The same as an echo gives, in vLLM's shape."""
    echoed = ask(client, echo=True, logprobs=1)["choices"][0]["logprobs"]["token_logprobs"][: len(ids)]
    first, second = ask(client, prompt_logprobs=2, logprobs=1, n=2)["choices"]
    chat = ask(client, CHATS, prompt_logprobs=2, add_special_tokens=True)
    for same in (second, chat):  # steps of other widths round in other ways
        for one, other in zip(first["prompt_logprobs"][1:], same["prompt_logprobs"][1:], strict=True):
            assert list(one) == list(other)
            assert all(other[token]["logprob"] == pytest.approx(one[token]["logprob"], abs=1e-3) for token in one)
    assert first["prompt_logprobs"][0] is None
    for token, own, expected in zip(ids[1:], first["prompt_logprobs"][1:], echoed[1:], strict=True):
        assert own[str(token)]["logprob"] == pytest.approx(expected, abs=1e-3)
        best = sorted((entry for entry in own.values() if entry["rank"]), key=lambda entry: entry["rank"])
        assert [entry["rank"] for entry in best] == [1, 2]
        assert best[0]["logprob"] >= best[1]["logprob"]
        assert {type(entry["decoded_token"]) for entry in own.values()} == {str}
    assert len(first["logprobs"]["tokens"]) == 3  # new ones alone, without an echo
    both = ask(client, echo=True, logprobs=1, prompt_logprobs=5)["choices"][0]["logprobs"]["top_logprobs"]
    assert all(len(entry) <= 2 for entry in both[1:])


def test_usage_in_streams(client: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}
    for path in (COMPLETIONS, CHATS):
        chunks = ask(client, path, stream=True, stream_options=options)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert chunks[-1]["choices"] == []
        assert counts[-1] == counts[-2] > 0
    alone = ask(client, stream=True, stream_options={"continuous_usage_stats": True})
    assert all(chunk["usage"] and chunk["choices"] for chunk in alone)


def test_contents_of_messages(client: Any, ids: list[int]) -> None:
    words = QUESTION.split(" ")
    parts = [
        {"type": "text", "text": words[0]},
        f" {words[1]}",
        [{"type": "input_text", "text": f" {words[2]}"}, [f" {words[3]}"]],
        {"type": "output_text", "text": " "},
        {"type": "refusal", "refusal": words[4]},
    ]
    answer = ask(client, CHATS, messages=[{"role": "user", "content": parts}], return_token_ids=True)
    assert answer["prompt_token_ids"] == ids[1:]
    unknown: dict[str, Any] = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [],
        "annotations": [],
        "x": 1,
    }
    ask(client, CHATS, messages=[unknown, *CHAT["messages"]])  # type: ignore[misc]


NEUTRAL = {
    "user": "me",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "auto",
    "request_id": "r",
    "rid": "r",
    "safety_identifier": "s",
    "prompt_cache_key": "p",
    "parallel_tool_calls": True,
    "priority": 0,
    "detokenize": True,
    "spaces_between_special_tokens": True,
    "logits_processors": [],
    "length_penalty": 1.0,
    "response_format": {"type": "text"},
    "tool_choice": "auto",
    "separate_reasoning": False,
    "regex": None,
    "logit_bias": None,
    "structured_outputs": None,
    "unheard_of": [1, {"a": None}],
    "n": None,
    "tools": [],
}


def test_fields_that_change_nothing_are_taken(client: Any) -> None:
    assert text(client, **NEUTRAL) == "123 123 123"
    assert ask(client, CHATS, **NEUTRAL)["choices"][0]["message"]["content"] == "123 123"


def test_nested_fields_that_change_the_answer(client: Any) -> None:
    nested: list[tuple[dict[str, Any], str]] = [
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"stream": True, "stream_options": {"every": 5}}, "stream_options.every"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 0}, "prompt_logprobs"),
        ({"messages": [{"role": "assistant", "content": "a", "prefix": True}]}, "messages.0.prefix"),
        ({"messages": [{"role": "user", "content": [[{"type": "image_url"}]]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
        ({"truncate_prompt_tokens": -1, "max_tokens": 10_000}, "max_tokens"),
        ({"structured_outputs": {"json": {}}}, "structured_outputs"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),  # the template knows no tools
    ]
    for fields, param in nested:
        response = client.post(CHATS, json={**CHAT, **fields})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), fields


def test_models_by_name_version_and_ping(client: Any, server: RunningServer) -> None:
    (listed,) = client.get("/v1/models").json()["data"]
    assert client.get("/v1/models/needle").json() == listed
    for name in ("other", "org/needle", "org%2Fneedle"):
        missing = client.get(f"/v1/models/{name}")
        assert missing.status_code == 404
        error = missing.json()["error"]
        assert (error["code"], error["param"], error["type"]) == ("model_not_found", "model", "not_found_error")
    assert client.get("/version").json() == {"version": dcpmla.__version__}
    assert [httpx2.request(method, f"{server.url}/ping").status_code for method in ("GET", "POST")] == [200, 200]
    assert httpx2.get(f"{server.url}/version").status_code == 401


def test_pages_of_other_origins(client: Any, server: RunningServer) -> None:
    """A preflight request has no key; errors have the header, too, or no page could read them."""
    asked = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
    asked["Access-Control-Request-Headers"] = "authorization,content-type"
    preflight = httpx2.options(f"{server.url}{CHATS}", headers=asked)
    assert preflight.status_code == 200
    assert preflight.headers["Access-Control-Allow-Origin"] == "*"
    assert "POST" in preflight.headers["Access-Control-Allow-Methods"]
    assert "authorization" in preflight.headers["Access-Control-Allow-Headers"].lower()
    origin = {"Origin": "https://chat.example"}
    refused = httpx2.post(f"{server.url}{COMPLETIONS}", json=GREEDY, headers=origin)
    streamed = client.post(COMPLETIONS, json={**GREEDY, "stream": True}, headers=origin)
    assert [refused.status_code, streamed.status_code] == [401, 200]
    for response in (refused, streamed, client.get("/v1/nowhere", headers=origin)):
        assert response.headers["Access-Control-Allow-Origin"] == "*"
