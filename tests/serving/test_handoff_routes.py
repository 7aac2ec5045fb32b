"""The prefill server's routes, and a router's field on both servers, over a fake engine."""

import asyncio
import logging
from dataclasses import asdict, fields
from typing import Any

import httpx2
import pytest

from dcpmla.runtime.handoffs import prompt_digest
from dcpmla.runtime.sampling import SamplingParams
from dcpmla.serving.messages import STAYS, Abort, Connect, Disconnect, Submit
from dcpmla.serving.prefills import Prefills
from dcpmla.serving.protocol import CompletionBody
from dcpmla.serving.transfer_fields import proof_of
from tests.support.servers import KEY
from tests.support.transfer_servers import FIRST, Network, Ranks, client, job, layout

PROMPT = [5, 6, 7]


def prefill_body(**changes: Any) -> dict[str, Any]:
    params = asdict(SamplingParams(max_new_tokens=9, seed=(1 << 64) - 1, temperature=0.5, logprobs=1))
    return {"handoff": "h", "engine": "d", "prompt_token_ids": PROMPT, "params": params, **changes}


def run(test: Any) -> None:
    asyncio.run(asyncio.wait_for(test, 120))


@pytest.mark.parametrize("path", ["/kv/connect", "/kv/prefill"])
@pytest.mark.parametrize(
    ("transfer_key", "key", "status"),
    [(None, "wrong", 401), (None, KEY, 400), ("of servers", KEY, 401), ("of servers", "of servers", 400)],
)
def test_the_routes_need_the_key_of_servers(path: str, transfer_key: str | None, key: str, status: int) -> None:
    async def test() -> None:
        ranks = Ranks("p")
        async with client(ranks.app("prefill", transfer_key=transfer_key), key) as http:
            answer = await http.post(path, json={})
        assert answer.status_code == status
        assert status != 401 or "KEY" in answer.json()["error"]["message"]
        assert not ranks.commands

    run(test())


def test_the_key_of_servers_opens_no_other_route() -> None:
    async def test() -> None:
        async with client(Ranks("p").app("prefill", transfer_key="of servers"), "of servers") as http:
            for path in ("/v1/models", "/metrics", "/kv", "/kv_connect"):
                assert (await http.get(path)).status_code == 401
            assert (await http.get("/health")).status_code == 200

    run(test())


@pytest.mark.parametrize("role", ["both", "decode"])
def test_other_roles_have_no_such_routes(role: str) -> None:
    async def test() -> None:
        async with client(Ranks("" if role == "both" else "d").app(role)) as http:
            for path, body in (("/kv/connect", job("d").json_fields()), ("/kv/prefill", prefill_body())):
                answer = await http.post(path, json=body)
                assert (answer.status_code, "--role" in answer.text) == (404, True)

    run(test())


def test_a_decode_server_connects_once_until_it_starts_again() -> None:
    async def test() -> None:
        ranks = Ranks("p")
        async with client(ranks.app("prefill")) as http:
            for engine in ("d", "d", "d2"):
                answer = await http.post("/kv/connect", json=job(engine).json_fields())
                content = answer.json()
                assert len(content.pop("secret")) >= 64
                assert Connect.of(content) == ranks.started.link
        assert ranks.commands == [job("d"), job("d2")]

    run(test())


def test_decode_servers_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that never had a prompt go first, then the least recently used."""
    monkeypatch.setattr("dcpmla.serving.handoffs._MOST_PEERS", 3)

    async def test() -> None:
        ranks = Ranks("p")
        async with client(ranks.app("prefill")) as http:

            async def connect(*engines: str) -> None:
                for engine in engines:
                    assert (await http.post("/kv/connect", json=job(engine).json_fields())).status_code == 200

            async def prefill(*engines: str) -> None:
                for engine in engines:
                    assert (await http.post("/kv/prefill", json=prefill_body(engine=engine))).status_code == 200

            await connect("d", "e")
            await prefill("e", "d")
            await connect("f", "invented1", "invented2")
            await prefill("invented2")
            await connect("g")
            await prefill("d")
            await connect("h")
        assert ranks.of(Disconnect) == [*map(Disconnect, ["f", "invented1", "e", "g"])]

    run(test())


def test_newcomers_drop_no_decode_server_with_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One server's prompt is being computed, and the ranks hold blocks for another, which has been here longer."""
    monkeypatch.setattr("dcpmla.serving.handoffs._MOST_PEERS", 2)

    async def test() -> None:
        ranks = Ranks("p", answers=False)
        async with client(ranks.app("prefill")) as http:

            async def connect(engine: str) -> int:
                return (await http.post("/kv/connect", json=job(engine).json_fields())).status_code

            assert [await connect(engine) for engine in ("e", "d")] == [200, 200]
            ranks.engine.readers = ["e"]
            prefill = asyncio.create_task(http.post("/kv/prefill", json=prefill_body()))
            submit = await ranks.wait_for(Submit)
            assert (submit.move.handoff, submit.move.reader) == ("h", "d")
            assert [await connect(f"invented{number}") for number in range(70)] == [503] * 70
            assert [await connect(engine) for engine in ("e", "d")] == [200, 200]
            ranks.answer(submit)
            assert (await prefill).status_code == 200
            ranks.engine.readers = ["d", "e"]  # until the blocks are read
            assert await connect("f") == 503
            ranks.engine.readers = ["e"]
            assert [await connect(engine) for engine in ("f", "g")] == [200, 200]
        assert ranks.of(Disconnect) == [Disconnect("d"), Disconnect("f")]

    run(test())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (job("d", layout(facts=(("dtype (--dtype)", "fp16"),))).json_fields(), "dtype (--dtype) is bf16"),
        (job("d", layout(facts=())).json_fields(), "dtype (--dtype) is bf16"),
        (job("d", layout(row_bytes=32)).json_fields(), "row_bytes is 64"),
        ({"layout": {}}, "layout"),
        ({"agents": ["AAAA", "AAAA"]}, "agents are 2"),
        ({"agents": ["?"]}, ""),
    ],
)
def test_other_caches_do_not_connect(changes: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture) -> None:
    """The refusal is the same for all, so it shows nothing of the cache. The log has the reason, once."""

    async def test() -> None:
        ranks = Ranks("p")
        async with client(ranks.app("prefill")) as http:
            answers = [await http.post("/kv/connect", json={**job("d").json_fields(), **changes}) for _ in range(2)]
        assert [(answer.status_code, answer.json()["error"]["message"]) for answer in answers] == [
            (409, "this server's cache is another one, or the body is wrong; the log of this server says more")
        ] * 2
        assert not ranks.commands

    with caplog.at_level(logging.WARNING):
        run(test())
    assert len(caplog.records) == 1
    assert words in caplog.text


@pytest.mark.parametrize("changes", [{"engine": "a/b"}, {"agents": ["A"] * 5000}, {"agents": ["A" * (2 << 20)]}])
def test_wrong_decode_servers(changes: dict[str, Any]) -> None:
    async def test() -> None:
        ranks = Ranks("p")
        async with client(ranks.app("prefill")) as http:
            answer = await http.post("/kv/connect", json={**job("d").json_fields(), **changes})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(changes)))
        assert not ranks.commands

    run(test())


def test_a_prompt_is_computed_with_its_own_seed() -> None:
    async def test() -> None:
        ranks = Ranks("p")
        async with client(ranks.app("prefill")) as http:
            assert (await http.post("/kv/prefill", json=prefill_body())).status_code == 409
            await http.post("/kv/connect", json=job("d").json_fields())
            answer = await http.post("/kv/prefill", json=prefill_body(cache_salt="s"))
            assert answer.json()["token"] == [7, -0.5, [[7, -0.5], [8, -9999.0]]]
        (submit,) = ranks.of(Submit)
        assert (submit.prompt_token_ids, submit.seeds, submit.cache_salt) == (PROMPT, [(1 << 64) - 1], "s")
        assert submit.move.handoff == "h"
        assert submit.params.temperature == 0.5

    run(test())


@pytest.mark.parametrize(
    "changes", [{"params": {"x": 1}}, {"params": {"temperature": "hot"}}, {"prompt_token_ids": []}, {"handoff": "a/b"}]
)
def test_wrong_prompts(changes: dict[str, Any]) -> None:
    async def test() -> None:
        ranks = Ranks("p")
        async with client(ranks.app("prefill")) as http:
            await http.post("/kv/connect", json=job("d").json_fields())
            answer = await http.post("/kv/prefill", json=prefill_body(**changes))
        assert answer.status_code == 400
        assert not ranks.of(Submit)

    run(test())


def test_a_closed_connection_aborts_the_prompt() -> None:
    async def test() -> None:
        ranks = Ranks("p", answers=False)
        app = ranks.app("prefill")
        async with client(app) as http:
            await http.post("/kv/connect", json=job("d").json_fields())
        sent = asyncio.Queue[Any]()
        body = httpx2.Request("POST", "http://server/kv/prefill", json=prefill_body())
        scope = {
            **{"type": "http", "method": "POST", "path": "/kv/prefill", "query_string": b"", "root_path": ""},
            **{"scheme": "http", "server": ("server", 81), "http_version": "1.1"},
            "headers": [(b"authorization", b"Bearer sesame")],
        }
        await sent.put({"type": "http.request", "body": body.content})
        answers: list[Any] = []

        async def send(message: Any) -> None:
            answers.append(message)

        task = asyncio.create_task(app(scope, sent.get, send))
        submit = await ranks.wait_for(Submit)
        await sent.put({"type": "http.disconnect"})
        await task
        assert ranks.of(Abort) == [Abort(submit.request_ids)]

    run(test())


def bring(kv: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": 4, "kv_transfer_params": {**kv, **changes}}


ASK = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}


class Proxy:
    """What vLLM's proxies do: a request goes to the prefill server, and with the answer's field to the other."""

    def __init__(self) -> None:
        self.here, self.there = Ranks("p"), Ranks("d")
        self.prefill = self.here.app("prefill")
        self.prefills = Prefills(["http://p"], self.there.engine, KEY, Network(p=self.prefill))
        self.decode = self.there.app("decode", self.prefills)

    async def first(self, body: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
        """Return the field that the prefill server answers a request with."""
        first = {**body, "kv_transfer_params": ASK, "stream": False, "max_tokens": 1}
        first.pop("stream_options", None)
        async with client(self.prefill) as http:
            answer = await http.post(path, json=first)
        assert answer.status_code == 200, answer.text
        kv: dict[str, Any] = answer.json().get("kv_transfer_params", {})
        return kv

    async def then(
        self, body: dict[str, Any], kv: dict[str, Any], path: str = "/v1/completions", status: int = 200
    ) -> Any:
        """Let the decode server, once it is connected, answer a request with a field; return its prompt for the ranks,
        or the error.
        """
        if not self.prefills.servers[0].engine:
            await self.prefills.servers[0]._connect()
        async with client(self.decode) as http:
            answer = await http.post(path, json={**body, "kv_transfer_params": kv} if kv else body)
        assert answer.status_code == status, answer.text
        return self.there.of(Submit)[-1] if status == 200 else answer.text


def test_a_router_s_request_has_its_first_token_from_the_prefill_server() -> None:
    async def test() -> None:
        for more in ({}, {"cache_salt": "pepper"}):
            proxy = Proxy()
            body = {"prompt": PROMPT, "max_tokens": 4, "stream": True, "seed": 3, **more}
            there = await proxy.then(body, await proxy.first(body))
            (here,) = proxy.here.of(Submit)
            assert there.move.source == ("p", here.move.handoff)
            assert there.move.first == FIRST._replace(logprob=None, top=())
            assert here.seeds == there.seeds

    run(test())


def test_several_answers_are_computed_by_the_decode_server() -> None:
    async def test() -> None:
        for body in ({"prompt": PROMPT, "n": 2}, {"prompt": [PROMPT, PROMPT]}):
            proxy = Proxy()
            await proxy.then(body, await proxy.first(body))
            assert {submit.move.handoff for submit in proxy.here.of(Submit)} == {""}  # else their blocks would be held
            assert {submit.move.source for submit in proxy.there.of(Submit)} == {None}

    run(test())


OTHER = [*PROMPT[:-1], 6]


@pytest.mark.parametrize(
    ("body", "again"),
    [
        ({"prompt": PROMPT}, {"prompt": OTHER}),
        ({"prompt": PROMPT}, {"prompt": PROMPT[1:]}),
        ({"prompt": PROMPT}, {"prompt": [*PROMPT, 8]}),
        ({"prompt": PROMPT, "cache_salt": "pepper"}, {"prompt": PROMPT}),
        ({"prompt": PROMPT}, {"prompt": PROMPT, "cache_salt": "pepper"}),
        ({"prompt": PROMPT, "cache_salt": "pepper"}, {"prompt": PROMPT, "cache_salt": "salt"}),
        ({"prompt": PROMPT, "cache_salt": "pepper"}, {"prompt": OTHER, "cache_salt": "pepper"}),
        ({"prompt": PROMPT}, {"prompt": PROMPT, "n": 2}),
    ],
)
def test_a_replay_for_another_prompt_or_salt_serves_nothing(body: dict[str, Any], again: dict[str, Any]) -> None:
    """The decode server computes the prompt itself, whatever a client adds to the field."""

    async def test() -> None:
        proxy = Proxy()
        kv = await proxy.first(body)
        own = await proxy.first({key: value for key, value in again.items() if key != "n"})
        assert (await proxy.then(body, kv)).move.source is not None
        mixed = [kv, kv | {"prompt_digest": "0" * 32}]
        mixed += [{**kv, name: own[name]} for name in ("proof", "remote_request_id", "first_token")]
        mixed += [{**own, name: kv[name]} for name in ("proof", "remote_request_id")]
        for each in mixed:
            assert (await proxy.then(again, each)).move == STAYS
        if "n" not in again:
            assert (await proxy.then(again, own)).move.source == ("p", own["remote_request_id"])

    run(test())


@pytest.mark.parametrize(
    "change",
    [
        {"first_token": "[8, null, []]"},
        {"first_token": "[7, null, [] ]"},
        {"first_token": "["},
        {"remote_request_id": "another"},
        {"proof": ""},
        {"proof": "\u00e9"},
        {"proof": "0" * 64},
    ],
)
def test_an_edited_field_serves_nothing(change: dict[str, Any]) -> None:
    async def test() -> None:
        proxy, body = Proxy(), {"prompt": PROMPT}
        kv = await proxy.first(body)
        assert (await proxy.then(body, kv | change)).move == STAYS
        # Nor does a proof that anyone can write.
        made = kv | change
        digest = prompt_digest(PROMPT, "")
        for secret in ("", KEY, "p", kv["proof"]):
            made["proof"] = proof_of(secret, made["remote_request_id"], made["first_token"], digest)
            assert (await proxy.then(body, made)).move == STAYS

    run(test())


def test_a_field_of_an_earlier_start_serves_nothing() -> None:
    async def test() -> None:
        proxy, body = Proxy(), {"prompt": PROMPT}
        assert (await Proxy().then(body, await proxy.first(body))).move == STAYS

    run(test())


def test_equal_prompts_share() -> None:
    """Two honest clients, each with its own transfer: both are pulled, and both prompts get the same keys of blocks."""

    async def test() -> None:
        proxy, body = Proxy(), {"prompt": PROMPT}
        kvs = [await proxy.first(body) for _ in range(2)]
        submits = [await proxy.then(body, kv) for kv in kvs]
        assert [submit.move.source for submit in submits] == [("p", kv["remote_request_id"]) for kv in kvs]
        assert {submit.cache_salt for submit in submits} == {""}

    run(test())


def test_a_streamed_prefill_ends_with_the_field() -> None:
    async def test() -> None:
        async with client(Ranks("p").app("prefill")) as http:
            answer = await http.post("/v1/completions", json={"prompt": PROMPT, "stream": True, **bring(ASK)})
        chunks = [line for line in answer.text.splitlines() if "kv_transfer_params" in line]
        assert len(chunks) == 1
        assert '"finish_reason":"length"' in chunks[0]

    run(test())


WHOLE = {"do_remote_prefill": True, "remote_engine_id": "x", "remote_request_id": "h", "first_token": "", "proof": ""}


@pytest.mark.parametrize(
    ("role", "kv", "words"),
    [
        ("both", ASK, "--role"),
        ("decode", ASK, "--role"),
        ("prefill", {"do_remote_prefill": True}, "--role"),
        *(("decode", WHOLE | {name: None}, "needs remote_engine_id") for name in [*WHOLE][1:]),
        ("decode", WHOLE | {"first_token": [7, None, []]}, "valid string"),
        ("decode", WHOLE, "--prefill-servers"),
    ],
)
def test_fields_that_do_not_suit_the_server(role: str, kv: dict[str, Any], words: str) -> None:
    async def test() -> None:
        ranks = Ranks("d")
        prefills = Prefills(["http://p"], ranks.engine, None, Network()) if role == "decode" else None
        async with client(ranks.app(role, prefills)) as http:
            answer = await http.post("/v1/completions", json=bring(kv))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "kv_transfer_params")
        assert words in answer.text
        assert not ranks.commands

    run(test())


def test_a_decode_server_that_is_not_connected_pulls_nothing() -> None:
    async def test() -> None:
        proxy, body = Proxy(), {"prompt": PROMPT}
        kv = await proxy.first(body)
        async with client(proxy.decode) as http:
            answer = await http.post("/v1/completions", json={**body, "kv_transfer_params": kv})
        assert (answer.status_code, "--prefill-servers" in answer.text) == (400, True)

    run(test())


NAMES = {"max_tokens": "max_new_tokens"}  # of fields whose parameter has another name
PARAMS = {field.name for field in fields(SamplingParams)}
LARGEST = 1 << 31
BEYOND: dict[str, list[Any]] = {  # values just beyond the limits of fields
    "max_tokens": [-1, LARGEST + 1],
    "min_tokens": [-1, LARGEST + 1],
    "temperature": [-1],
    "top_p": [0, 1.01],
    "top_k": [-2, LARGEST + 1],
    "min_p": [-0.01, 1.01],
    "seed": [-(1 << 64), 1 << 64],
    "stop": ["a" * 257, ["a"] * 17, ["a" * 257], [""]],
    "stop_token_ids": [[1] * 257, [-1]],
    "presence_penalty": [-2.01, 2.01],
    "frequency_penalty": [-2.01, 2.01],
    "repetition_penalty": [0, 100.1],
    "logit_bias": [{str(number): 0.0 for number in range(1025)}, {"5": -100.1}, {"5": 100.1}],
    "logprobs": [-1, 21],
    "prompt_logprobs": [-1, 21],
}


def test_each_field_with_a_range_has_values_beyond_it() -> None:
    without = {"ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "grammar"}
    assert {NAMES.get(field, field) for field in BEYOND} == PARAMS - without
    assert BEYOND.keys() <= CompletionBody.model_fields.keys()


@pytest.mark.parametrize("field", BEYOND)
def test_every_door_has_the_limits_of_the_fields(field: str) -> None:
    async def test() -> None:
        name, values = NAMES.get(field, field), BEYOND[field]
        own = asdict(SamplingParams(max_new_tokens=9))
        for role in ("both", "prefill", "decode"):
            ranks = Ranks("" if role == "both" else "p")
            async with client(ranks.app(role)) as http:
                for value in values:
                    answer = await http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 9, field: value})
                    assert (answer.status_code, value) == (400, value)
                if role != "prefill":
                    continue
                await http.post("/kv/connect", json=job("d").json_fields())
                for value in values:
                    answer = await http.post("/kv/prefill", json=prefill_body(params={**own, name: value}))
                    assert (answer.status_code, value) == (400, value)
                    assert name in answer.json()["error"]["message"]
            assert not ranks.of(Submit)

    run(test())


EOS = {"ignore_eos": True}
LONG = "a" * (1 << 16) + "b"


@pytest.mark.parametrize(
    ("body", "params"),
    [
        ({"structured_outputs": {"regex": LONG}}, {"grammar": {"kind": "regex", "text": LONG}}),
        ({"structured_outputs": {"choice": [LONG]}}, {"grammar": {"kind": "choice", "text": f'["{LONG}"]'}}),
        (None, {"grammar": {"kind": "grammar", "text": "a" * ((1 << 20) + 1)}}),
        (None, {"grammar": {"kind": "regex", "text": "a", "starts_after": [1] * 65}}),
        (None, {"grammar": {"kind": "regex", "text": "a", "starts_after": [1000]}}),
        ({"logit_bias": {"1000": 1}}, {"logit_bias": {"1000": 1}}),
        (
            {"structured_outputs": {"regex": "a"}} | EOS,
            {"grammar": {"kind": "regex", "text": "a"}, "ignore_eos": True},
        ),
        ({"prompt": [1000]}, None),
        ({"prompt": [-1]}, None),
        ({"prompt": [1 << 40]}, None),
        ({"prompt": [1] * 500}, None),
        ({"prompt": []}, None),
        ({"cache_salt": "a" * 1025}, None),
    ],
    ids=repr,
)
def test_every_door_has_the_other_limits(body: dict[str, Any] | None, params: dict[str, Any] | None) -> None:
    async def test() -> None:
        ranks = Ranks("p")
        async with client(ranks.app("prefill")) as http:
            await http.post("/kv/connect", json=job("d").json_fields())
            if body is not None:
                assert (await http.post("/v1/completions", json={"prompt": PROMPT, **body})).status_code == 400
            more = {"prompt_token_ids" if key == "prompt" else key: value for key, value in (body or {}).items()}
            more = more if params is None else {"params": {"max_new_tokens": 1, **params}}
            assert (await http.post("/kv/prefill", json=prefill_body(**more))).status_code == 400
        assert not ranks.of(Submit)

    run(test())


class Refusing:
    """A worker that refuses each grammar."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    async def call(self, model: Any, function: Any, kind: str, text: str) -> Any:
        self.texts.append(text)
        return ["pattern"], "it is refused"


def test_grammars_are_checked_at_every_door() -> None:
    async def test() -> None:
        ranks, worker = Ranks("p"), Refusing()
        async with client(ranks.app("prefill", worker=worker)) as http:
            await http.post("/kv/connect", json=job("d").json_fields())
            grammar = {"kind": "regex", "text": "[ab]", "starts_after": []}
            fields = {"prompt": PROMPT, "structured_outputs": {"regex": "[ab]"}}
            answers = [
                await http.post("/v1/completions", json=fields),
                await http.post("/v1/completions", json=fields | {"kv_transfer_params": ASK}),
                await http.post("/kv/prefill", json=prefill_body(params={"max_new_tokens": 1, "grammar": grammar})),
            ]
        paths = ["structured_outputs.regex.pattern"] * 2 + ["params.grammar.pattern"]
        assert [(each.status_code, each.json()["error"]["param"]) for each in answers] == [
            (400, path) for path in paths
        ]
        assert worker.texts == ["[ab]"] * 3
        assert not ranks.of(Submit)

    run(test())


def test_parameters_of_an_honest_decode_server_are_taken() -> None:
    """All parameters at their limits, as a decode server sends them."""

    async def test() -> None:
        ranks = Ranks("p")
        params = SamplingParams(
            max_new_tokens=1 << 31,
            temperature=10**30,
            min_tokens=1,
            top_k=1 << 31,
            stop=("a" * 256,) * 16,
            stop_token_ids=(1,) * 256,
            presence_penalty=2,
            frequency_penalty=-2,
            logprobs=20,
            prompt_logprobs=20,
            logit_bias={number: -100.0 for number in range(1000)},
        )
        async with client(ranks.app("prefill")) as http:
            await http.post("/kv/connect", json=job("d").json_fields())
            answer = await http.post("/kv/prefill", json=prefill_body(params=asdict(params), cache_salt="a" * 1024))
        assert answer.status_code == 200, answer.text
        assert len(ranks.of(Submit)) == 1

    run(test())
