"""Limits of requests, whatever the door: a body of a client's route, or a prompt that a decode server sends."""

from dataclasses import asdict, fields
from typing import Any

import pytest

from dcpmla.runtime.sampling import SamplingParams
from dcpmla.serving.messages import Submit
from dcpmla.serving.protocol import CompletionBody
from tests.support.transfer_servers import ASK, PROMPT, Ranks, client, connected, prefill_body

NAMES = {"max_tokens": "max_new_tokens"}  # of fields whose parameter has another name
PARAMS = {field.name for field in fields(SamplingParams)}
OF_PROMPTS = {"prompt": "prompt_token_ids", "cache_salt": "cache_salt"}  # fields that are no parameters
LARGEST = 1 << 31
WRONG: dict[str, list[Any]] = {  # values of a wrong kind, or just beyond the limits of fields
    "prompt": [None, 5, [], [[]], [1, "a"], [-1], [1000], [1 << 40], [1 << 70], [1] * 500, {"text": "x"}],
    "cache_salt": ["", 5, "a" * 1025],
    "max_tokens": [-1, LARGEST + 1, 10**30, "5", 1.5],
    "min_tokens": [-1, 10, LARGEST + 1],
    "temperature": [-1, "hot", 10**400],
    "top_p": [0, 1.01],
    "top_k": [-2, LARGEST + 1],
    "min_p": [-0.01, 1.01],
    "seed": [-(1 << 64), 1 << 64],
    "stop": ["a" * 257, ["a"] * 17, ["a" * 257], [""]],
    "stop_token_ids": [[1] * 257, [-1], [LARGEST], [10**30]],
    "presence_penalty": [-2.01, 2.01],
    "frequency_penalty": [-2.01, 2.01],
    "repetition_penalty": [0, 100.1],
    "logit_bias": [
        *({str(number): 0.0 for number in range(1025)}, {"5": -100.1}, {"5": 100.1}, {"1000": 1}),
        *({"-5": 1}, {"x": 1}, [5]),
    ],
    "logprobs": [-1, 21],
    "prompt_logprobs": [-1, 21],
    "include_stop_str_in_output": ["yes"],
}
WRONG_OF_BODIES: dict[str, list[Any]] = {  # fields that become no parameters
    "max_tokens": [0],
    "logit_bias": [{"05": 1}],
    "max_completion_tokens": [0],
    "n": [0, 100_000],
    "stream": ["yes"],
    "stream_options": [7],
    "best_of": [4],
    "truncate_prompt_tokens": [0, -2, "many"],
    "suffix": ["end"],
    "guided_json": [{"type": "object"}],
}


def test_each_field_with_a_range_has_values_beyond_it() -> None:
    without = {"ignore_eos", "skip_special_tokens", "grammar"}
    assert {NAMES.get(field, field) for field in WRONG} - OF_PROMPTS.keys() == PARAMS - without
    assert WRONG.keys() <= CompletionBody.model_fields.keys()


@pytest.mark.parametrize("field", WRONG | WRONG_OF_BODIES)
async def test_every_door_has_the_limits_of_the_fields(field: str) -> None:
    good = {"prompt": PROMPT, "max_tokens": 9}
    for role in ("both", "prefill", "decode"):
        ranks = Ranks("" if role == "both" else "p")
        async with client(ranks.app(role)) as http:
            for value in [*WRONG.get(field, ()), *WRONG_OF_BODIES.get(field, ())]:
                answer = await http.post("/v1/completions", json={**good, field: value})
                error = answer.json()["error"]
                assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), value
                assert error["param"] == field, value
        assert not ranks.of(Submit)


@pytest.mark.parametrize("field", WRONG)
async def test_prompts_of_servers_have_the_limits_of_the_fields(field: str) -> None:
    name, own = NAMES.get(field, field), asdict(SamplingParams(max_new_tokens=9))
    async with connected(ranks := Ranks("p")) as http:
        for value in WRONG[field]:
            changes = {OF_PROMPTS[field]: value} if field in OF_PROMPTS else {"params": {**own, name: value}}
            answer = await http.post("/kv/prefill", json=prefill_body(**changes))
            assert answer.status_code == 400, value
            assert OF_PROMPTS.get(field, name).removesuffix("_token_ids") in answer.json()["error"]["message"], value
    assert not ranks.of(Submit)


async def test_chats_have_limits_of_their_own() -> None:
    chat = {"messages": [{"role": "user", "content": "x"}]}
    async with client(Ranks("").app("both")) as http:
        for field, value in (("tools", ["x"]), ("top_logprobs", 3), ("messages", []), ("max_tokens", 0)):
            answer = await http.post("/v1/chat/completions", json={**chat, field: value})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


LONG = "a" * (1 << 16) + "b"


@pytest.mark.parametrize(
    ("body", "params"),
    [
        ({"structured_outputs": {"regex": LONG}}, {"grammar": {"kind": "regex", "text": LONG}}),
        ({"structured_outputs": {"choice": [LONG]}}, {"grammar": {"kind": "choice", "text": f'["{LONG}"]'}}),
        (None, {"grammar": {"kind": "grammar", "text": "a" * ((1 << 20) + 1)}}),
        (None, {"grammar": {"kind": "regex", "text": "a", "starts_after": [1] * 65}}),
        (None, {"grammar": {"kind": "regex", "text": "a", "starts_after": [1000]}}),
        (
            {"structured_outputs": {"regex": "a"}, "ignore_eos": True},
            {"grammar": {"kind": "regex", "text": "a"}, "ignore_eos": True},
        ),
        (None, {"x": 1}),
    ],
    ids=repr,
)
async def test_every_door_has_the_limits_of_grammars(body: dict[str, Any] | None, params: dict[str, Any]) -> None:
    async with connected(ranks := Ranks("p")) as http:
        if body is not None:
            assert (await http.post("/v1/completions", json={"prompt": PROMPT, **body})).status_code == 400
        sent = prefill_body(params={"max_new_tokens": 1, **params})
        assert (await http.post("/kv/prefill", json=sent)).status_code == 400
    assert not ranks.of(Submit)


class Refusing:
    """A worker that refuses each grammar."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    async def call(self, model: Any, function: Any, kind: str, text: str) -> Any:
        self.texts.append(text)
        return ["pattern"], "it is refused"


async def test_grammars_are_checked_at_every_door() -> None:
    worker = Refusing()
    async with connected(ranks := Ranks("p"), worker=worker) as http:
        grammar = {"kind": "regex", "text": "[ab]", "starts_after": []}
        body = {"prompt": PROMPT, "structured_outputs": {"regex": "[ab]"}}
        answers = [
            await http.post("/v1/completions", json=body),
            await http.post("/v1/completions", json=body | {"kv_transfer_params": ASK}),
            await http.post("/kv/prefill", json=prefill_body(params={"max_new_tokens": 1, "grammar": grammar})),
        ]
    found = [(each.status_code, each.json()["error"]["param"]) for each in answers]
    assert found == [*[(400, "structured_outputs.regex.pattern")] * 2, (400, "params.grammar.pattern")]
    assert worker.texts == ["[ab]"] * 3
    assert not ranks.of(Submit)


async def test_parameters_of_an_honest_decode_server_are_taken() -> None:
    """All parameters at their limits, as a decode server sends them."""
    params = SamplingParams(
        max_new_tokens=LARGEST,
        temperature=10**30,
        min_tokens=1,
        top_k=LARGEST,
        stop=("a" * 256,) * 16,
        stop_token_ids=(1,) * 256,
        presence_penalty=2,
        frequency_penalty=-2,
        logprobs=20,
        prompt_logprobs=20,
        logit_bias={number: -100.0 for number in range(1000)},
    )
    async with connected(ranks := Ranks("p")) as http:
        answer = await http.post("/kv/prefill", json=prefill_body(params=asdict(params), cache_salt="a" * 1024))
    assert answer.status_code == 200, answer.text
    assert len(ranks.of(Submit)) == 1
