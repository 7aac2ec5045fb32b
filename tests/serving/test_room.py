"""Limits of new tokens beyond the room that `--max-model-len` and the prompt leave, by the APIs' own clients."""

from typing import Any

import anthropic
import httpx2
import openai
import pytest

from tests.support.servers import KEY, MAX_MODEL_LEN, RunningServer, read_events

LONG = "amber-ant 123; " * 670  # of 3 tokens each, which leaves a small part of the room
FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/completions": ("max_tokens", {"prompt": LONG}),
    "/v1/chat/completions": ("max_completion_tokens", {"messages": [{"role": "user", "content": LONG}]}),
    "/v1/responses": ("max_output_tokens", {"input": LONG}),
    "/v1/messages": ("max_tokens", {"messages": [{"role": "user", "content": LONG}]}),
}


def test_a_limit_that_no_sequence_has_is_refused(server: RunningServer) -> None:
    """As vLLM and the APIs themselves do."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
    messages: Any = [{"role": "user", "content": "amber-ant"}]
    too_many = MAX_MODEL_LEN + 1
    words = r"is 2,049; prompt and new tokens together have at most 2,048 here"
    for name, ask in (
        ("max_tokens", lambda **more: client.completions.create(model="needle", prompt="amber-ant", **more)),
        ("max_tokens", lambda **more: client.chat.completions.create(model="needle", messages=messages, **more)),
        (
            "max_completion_tokens",
            lambda **more: client.chat.completions.create(model="needle", messages=messages, stream=True, **more),
        ),
        ("max_output_tokens", lambda **more: client.responses.create(model="needle", input="amber-ant", **more)),
    ):
        with pytest.raises(openai.BadRequestError, match=f"{name} {words}") as raised:
            ask(**{name: too_many})
        assert raised.value.param == name
    other = anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0)
    with pytest.raises(anthropic.BadRequestError, match=f"max_tokens {words}"):
        other.messages.create(model="needle", messages=messages, max_tokens=too_many)


@pytest.mark.parametrize("path", FIELDS)
def test_a_limit_beyond_the_prompt_s_room_is_cut_and_the_header_says_so(client: httpx2.Client, path: str) -> None:
    name, fields = FIELDS[path]
    ends_where_it_must = path in ("/v1/completions", "/v1/chat/completions")
    more = {"temperature": 0, **({"ignore_eos": True} if ends_where_it_must else {})}
    answer = client.post(path, json={**fields, **more, name: MAX_MODEL_LEN}).raise_for_status()
    usage = answer.json()["usage"]
    num_prompt, num_new = (usage.get(f"{each}_tokens", 0) for each in ("prompt", "completion"))
    if "input_tokens" in usage:
        num_prompt, num_new = usage["input_tokens"], usage["output_tokens"]
        num_prompt += usage.get("cache_read_input_tokens", 0)
    room = MAX_MODEL_LEN - num_prompt
    assert 0 < room < MAX_MODEL_LEN // 10
    assert answer.headers["dcpmla-max-tokens"] == str(room)
    assert num_new == room or not ends_where_it_must
    for limit in (room, None):
        if limit is None and path == "/v1/messages":
            continue  # which need one
        fitting = client.post(path, json={**fields, **more, name: limit}).raise_for_status()
        assert "dcpmla-max-tokens" not in fitting.headers


def test_the_header_of_several_prompts_and_of_a_stream(client: httpx2.Client) -> None:
    """The longest prompt has the least room; a limit by default is none of the client's."""
    prompts = [[9] * (MAX_MODEL_LEN - number) for number in (30, 5)]
    body = {"prompt": prompts, "max_tokens": 20, "ignore_eos": True}
    answer = client.post("/v1/completions", json=body).raise_for_status()
    assert answer.headers["dcpmla-max-tokens"] == "5"
    assert answer.json()["usage"]["completion_tokens"] == 20 + 5
    stream = client.post("/v1/completions", json={**body, "stream": True}).raise_for_status()
    assert stream.headers["dcpmla-max-tokens"] == "5"
    reasons = [
        choice["finish_reason"] for event in read_events(stream.text.splitlines()) for choice in event["choices"]
    ]
    assert reasons.count("length") == 2
    default = client.post("/v1/completions", json={"prompt": prompts[1], "ignore_eos": True}).raise_for_status()
    assert "dcpmla-max-tokens" not in default.headers
    assert default.json()["usage"]["completion_tokens"] == 5
