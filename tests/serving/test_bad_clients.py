"""Clients that are mistaken, rude or hostile: each gets its error, and nobody else notices.

Absurd bodies are refused before they are parsed, large ones are not; unknown fields are dropped.
"""

import json
import time
from contextlib import suppress
from typing import Any

import httpx2
import pytest

from dcpmla.serving.chat_body import ChatBody
from dcpmla.serving.errors import ApiError
from dcpmla.serving.protocol import CompletionBody, parse
from tests.support.servers import AUTHORIZED, KEY, QUESTION, RunningServer

GOOD = {"prompt": QUESTION, "max_tokens": 1, "temperature": 0}


@pytest.fixture
def check(server: RunningServer) -> Any:
    """Check afterwards that the server answers as before."""
    yield
    answer = httpx2.post(f"{server.url}/v1/completions", json=GOOD, headers=AUTHORIZED, timeout=30).json()
    assert answer["choices"][0]["text"] == "123"
    assert httpx2.get(f"{server.url}/health").status_code == 200
    assert all(process.is_alive() for process in server.processes)


BROKEN = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"text"',
    b'{"prompt": "a"',
    b'{"prompt": "\xff\xfe"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "temperature": Infinity}',
    b'{"prompt": ' + b"[" * 100_000,
    b'{"x":' * 50_000 + b"1" + b"}" * 50_000,
    json.dumps({"prompt": "amber-ant 1; " * 800_000}).encode(),  # 10 MB: more tokens than fit
    json.dumps({"prompt": ["x"] * 500_000, "max_tokens": 1}).encode(),
    b'{"prompt": [1], ' + b",".join(b'"x%d": 1' % number for number in range(1_000_000)) + b"}",
    b'{"prompt": [1], "x": ' + b'"\\"' * 5_000_000 + b'"}',
    b'"' * (15 << 20),
]


def test_broken_bodies(client: Any, check: None) -> None:
    for body in BROKEN:
        response = client.post("/v1/completions", content=body)
        assert response.status_code in (400, 429), body[:60]
        assert response.json()["error"]["message"]
    assert client.post("/v1/completions", content=b" " * (17 << 20)).status_code == 413
    assert client.post("/tokenize", json={}).status_code == 400
    assert client.post("/detokenize", json={"tokens": [99999999]}).status_code == 400


def test_wrong_keys_names_and_routes(client: Any, server: RunningServer, check: None) -> None:
    for key in ("", KEY, f"Bearer {KEY}x", f"bearer {KEY}", "Bearer \xe9"):
        for route in ("/v1/models", "/metrics", "/v1/completions", "/nowhere"):
            refused = httpx2.get(f"{server.url}{route}", headers={"Authorization": key.encode("latin-1")})
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
    wrong = client.post("/v1/completions", json={**GOOD, "model": "gpt-4"})
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (404, "model_not_found")
    assert client.get("/v1/nothing").json()["error"]["type"] == "not_found_error"
    assert client.get("/v1/completions").status_code == 405
    assert KEY not in server.log()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop": ["a", ""]}, "stop is ['a', '']; it must be at most 16 strings of 1 to 256 characters"),
        ({"temperature": -1}, "temperature is -1; it must be a finite number of at least 0"),
        ({"temperature": True}, "temperature is True; it must be a finite number of at least 0"),
        ({"top_k": 1.5}, "top_k is 1.5; it must be a whole number in [-1, 2147483648] (-1 and 0 are all tokens)"),
        ({"n": 0, "seed": "a"}, "n is 0; it must be a whole number in [1, 128]"),
        ({"prompt": []}, "prompt: List should have at least 1 item after validation, not 0"),
        ({"prompt": [1, "a"]}, "prompt[1]: Input should be a valid integer"),
        ({"prompt": ["a", [1, 2]]}, "prompt[1]: Input should be a valid string"),
        ({"prompt": 5}, "prompt: Input should be a valid string"),
    ],
)
def test_the_mistake_in_a_field_of_several_kinds(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse(CompletionBody, json.dumps({**GOOD, **fields}).encode())
    assert caught.value.message == message


def test_a_good_body_asks_for_what_it_says() -> None:
    body = parse(CompletionBody, json.dumps({"prompt": "a", "seed": -1, "stop": "x", "top_k": -1, "n": 3}).encode())
    params = body.params(5, 2, None)
    assert (params.seed, params.stop, params.top_k, params.temperature) == (2**64 - 1, ("x",), 0, 1.0)
    assert (params.max_new_tokens, params.logprobs, body.num_choices) == (5, 2, 3)
    random_seeds = {parse(CompletionBody, b'{"prompt": "a"}').params(1, None, None).seed for _ in range(4)}
    assert len(random_seeds) == 4


MESSAGE = {"role": "user", "content": "x"}


def test_an_absurd_body_is_refused_before_it_is_parsed() -> None:
    content = '{"messages": [' + ",".join([json.dumps(MESSAGE)] * 400_000) + "]}"
    times = []
    for function in (lambda: parse(ChatBody, content.encode()), lambda: json.loads(content)):
        start = time.process_time()
        with suppress(ApiError):
            function()
        times.append(time.process_time() - start)
    assert times[0] < times[1]


@pytest.mark.parametrize("value", ["[]", "{}", '"a"', '"\\""', "1" + ",1" * 9])
def test_values_of_each_kind_have_a_limit(value: str) -> None:
    content = '{"prompt": [1], "x": [' + ",".join([value] * 300_000) + "]}"
    with pytest.raises(ApiError, match="the body has too many values"):
        parse(CompletionBody, content.encode())
    assert parse(CompletionBody, (content[: content.index(value)] + value + "]}").encode()).prompt == [1]


def test_large_bodies_that_are_not_absurd() -> None:
    texts = ['[{"a": "b"}], ' * 100_000, "\\" * 1_000_000, '\\"' * 1_000_000]
    for text in texts:
        body = parse(CompletionBody, json.dumps({"prompt": text}).encode())
        assert body.prompt == text
    ids = [123_456] * 1_000_000
    assert parse(CompletionBody, json.dumps({"prompt": ids}).encode()).prompt == ids
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}]}] * 10_000
    assert len(parse(ChatBody, json.dumps({"messages": messages}).encode()).messages) == 10_000


def test_nothing_is_kept_of_unknown_fields() -> None:
    bodies: list[tuple[Any, dict[str, Any]]] = [
        (CompletionBody, {"prompt": "a"}),
        (ChatBody, {"messages": [{**MESSAGE, "x": ["y"]}]}),
    ]
    for kind, fields in bodies:
        body = parse(kind, json.dumps({**fields, "x": ["y"] * 1000}).encode())
        assert not body.model_extra
    assert '"x"' not in body.model_dump_json().replace('"content":"x"', "")
    with pytest.raises(ApiError, match="functions is not supported"):
        parse(ChatBody, json.dumps({**fields, "functions": ["x"]}).encode())
