"""The prefill server's routes, and a router's field on both servers, over a fake engine."""

import asyncio
import json
import logging
from typing import Any

import pytest

from dcpmla.runtime.handoffs import prompt_digest
from dcpmla.serving.messages import STAYS, Abort, Connect, Disconnect, Submit, unpack_tokens
from dcpmla.serving.prefills import Prefills
from dcpmla.serving.transfer_fields import proof_of
from tests.support.asgi import Client
from tests.support.servers import KEY
from tests.support.transfer_servers import (
    ASK,
    FIRST,
    PROMPT,
    Network,
    Ranks,
    client,
    connect,
    job,
    layout,
    prefill_body,
)


@pytest.mark.parametrize("path", ["/kv/connect", "/kv/prefill"])
@pytest.mark.parametrize(
    ("transfer_key", "key", "status"),
    [(None, "wrong", 401), (None, KEY, 400), ("of servers", KEY, 401), ("of servers", "of servers", 400)],
)
async def test_the_routes_need_the_key_of_servers(path: str, transfer_key: str | None, key: str, status: int) -> None:
    ranks = Ranks("p")
    async with client(ranks.app("prefill", transfer_key=transfer_key), key) as http:
        answer = await http.post(path, json={})
    assert answer.status_code == status
    assert status != 401 or "KEY" in answer.json()["error"]["message"]
    assert not ranks.commands


async def test_the_key_of_servers_opens_no_other_route() -> None:
    async with client(Ranks("p").app("prefill", transfer_key="of servers"), "of servers") as http:
        for path in ("/v1/models", "/metrics", "/kv", "/kv_connect"):
            assert (await http.get(path)).status_code == 401
        assert (await http.get("/health")).status_code == 200


@pytest.mark.parametrize("role", ["both", "decode"])
async def test_other_roles_have_no_such_routes(role: str) -> None:
    async with client(Ranks("" if role == "both" else "d").app(role)) as http:
        for path, body in (("/kv/connect", job("d").json_fields()), ("/kv/prefill", prefill_body())):
            answer = await http.post(path, json=body)
            assert (answer.status_code, "--role" in answer.text) == (404, True)


async def test_a_decode_server_connects_once_until_it_starts_again() -> None:
    ranks = Ranks("p")
    async with client(ranks.app("prefill")) as http:
        for engine in ("d", "d", "d2"):
            content = (await connect(http, engine)).json()
            assert len(content.pop("secret")) >= 64
            assert Connect.of(content) == ranks.started.link
    assert ranks.commands == [job("d"), job("d2")]


async def test_decode_servers_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that never had a prompt go first, then the least recently used."""
    monkeypatch.setattr("dcpmla.serving.handoffs._MOST_PEERS", 3)
    ranks = Ranks("p")
    async with client(ranks.app("prefill")) as http:
        for new, used in (("d e", "e d"), ("f invented1 invented2", "invented2"), ("g", "d"), ("h", "")):
            for engine in new.split():
                assert (await connect(http, engine)).status_code == 200
            for engine in used.split():
                assert (await http.post("/kv/prefill", json=prefill_body(engine=engine))).status_code == 200
    assert ranks.of(Disconnect) == [*map(Disconnect, ["f", "invented1", "e", "g"])]


async def test_newcomers_drop_no_decode_server_with_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One server's prompt is being computed, and the ranks hold blocks for another, which has been here longer."""
    monkeypatch.setattr("dcpmla.serving.handoffs._MOST_PEERS", 2)
    ranks = Ranks("p", answers=False)
    async with client(ranks.app("prefill")) as http:

        async def join(*engines: str) -> list[int]:
            return [(await connect(http, engine)).status_code for engine in engines]

        assert await join("e", "d") == [200, 200]
        ranks.engine.readers = ["e"]
        prefill = asyncio.create_task(http.post("/kv/prefill", json=prefill_body()))
        submit = await ranks.wait_for(Submit)
        assert (submit.move.handoff, submit.move.reader) == ("h", "d")
        assert await join(*(f"invented{number}" for number in range(70))) == [503] * 70
        assert await join("e", "d") == [200, 200]
        ranks.answer(submit)
        assert (await prefill).status_code == 200
        ranks.engine.readers = ["d", "e"]  # until the blocks are read
        assert await join("f") == [503]
        ranks.engine.readers = ["e"]
        assert await join("f", "g") == [200, 200]
    assert ranks.of(Disconnect) == [Disconnect("d"), Disconnect("f")]


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
async def test_other_caches_do_not_connect(
    changes: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The refusal is the same for all, so it shows nothing of the cache. The log has the reason, once."""
    ranks = Ranks("p")
    with caplog.at_level(logging.WARNING):
        async with client(ranks.app("prefill")) as http:
            answers = [await connect(http, **changes) for _ in range(2)]
    assert [(answer.status_code, answer.json()["error"]["message"]) for answer in answers] == [
        (409, "this server's cache is another one, or the body is wrong; the log of this server says more")
    ] * 2
    assert not ranks.commands
    assert len(caplog.records) == 1
    assert words in caplog.text


@pytest.mark.parametrize("changes", [{"engine": "a/b"}, {"agents": ["A"] * 5000}, {"agents": ["A" * (2 << 20)]}])
async def test_wrong_decode_servers(changes: dict[str, Any]) -> None:
    ranks = Ranks("p")
    async with client(ranks.app("prefill")) as http:
        answer = await connect(http, **{"engine": "d", **changes})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(changes)))
    assert not ranks.commands


async def test_a_prompt_is_computed_with_its_own_seed() -> None:
    ranks = Ranks("p")
    async with client(ranks.app("prefill")) as http:
        assert (await http.post("/kv/prefill", json=prefill_body())).status_code == 409
        await connect(http)
        assert (await http.post("/kv/prefill", json=prefill_body(handoff="a/b"))).status_code == 400
        answer = await http.post("/kv/prefill", json=prefill_body(cache_salt="s"))
        assert answer.json()["token"] == [7, -0.5, [[7, -0.5], [8, -9999.0]]]
    (submit,) = ranks.of(Submit)
    assert (unpack_tokens(submit.prompt).tolist(), submit.seeds, submit.cache_salt) == (PROMPT, [(1 << 64) - 1], "s")
    assert submit.move.handoff == "h"
    assert submit.params.temperature == 0.5


async def test_a_closed_connection_aborts_the_prompt() -> None:
    ranks = Ranks("p", answers=False)
    app = ranks.app("prefill")
    async with client(app) as http:
        await connect(http)
    leaving = Client(app, "/kv/prefill", json.dumps(prefill_body()).encode(), KEY)
    submit = await ranks.wait_for(Submit)
    await leaving.leave()
    assert ranks.of(Abort) == [Abort(submit.request_ids)]


def bring(kv: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": 4, "kv_transfer_params": {**kv, **changes}}


class Proxy:
    """What vLLM's proxies do: a request goes to the prefill server, and with the answer's field to the other."""

    def __init__(self) -> None:
        self.here, self.there = Ranks("p"), Ranks("d")
        self.prefill = self.here.app("prefill")
        self.prefills = Prefills(["http://p"], self.there.engine, KEY, Network(p=self.prefill))
        self.decode = self.there.app("decode", self.prefills)

    async def first(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the field that the prefill server answers a request with."""
        first = {**body, "kv_transfer_params": ASK, "stream": False, "max_tokens": 1}
        async with client(self.prefill) as http:
            answer = await http.post("/v1/completions", json=first)
        assert answer.status_code == 200, answer.text
        kv: dict[str, Any] = answer.json().get("kv_transfer_params", {})
        return kv

    async def then(self, body: dict[str, Any], kv: dict[str, Any]) -> Any:
        """Let the decode server, once it is connected, answer a request with a field; return its prompt for the
        ranks.
        """
        if not self.prefills.servers[0].engine:
            await self.prefills.servers[0]._connect()
        async with client(self.decode) as http:
            answer = await http.post("/v1/completions", json={**body, "kv_transfer_params": kv} if kv else body)
        assert answer.status_code == 200, answer.text
        return self.there.of(Submit)[-1]


@pytest.mark.parametrize("salt", ["", "pepper"])
async def test_a_router_s_request_has_its_first_token_from_the_prefill_server(salt: str) -> None:
    """Two honest clients have equal prompts, each its own transfer: both are pulled, with the same keys of blocks."""
    proxy = Proxy()
    body = {"prompt": PROMPT, "max_tokens": 4, "stream": True, "seed": 3} | ({"cache_salt": salt} if salt else {})
    kvs = [await proxy.first(body) for _ in range(2)]
    for kv, here in zip(kvs, proxy.here.of(Submit), strict=True):
        there = await proxy.then(body, kv)
        assert there.move.source == ("p", here.move.handoff) == ("p", kv["remote_request_id"])
        assert there.move.first == FIRST._replace(logprob=None, top=())
        assert (here.seeds, there.cache_salt) == (there.seeds, salt)


async def test_several_answers_are_computed_by_the_decode_server() -> None:
    for body in ({"prompt": PROMPT, "n": 2}, {"prompt": [PROMPT, PROMPT]}):
        proxy = Proxy()
        await proxy.then(body, await proxy.first(body))
        assert {submit.move.handoff for submit in proxy.here.of(Submit)} == {""}  # else their blocks would be held
        assert {submit.move.source for submit in proxy.there.of(Submit)} == {None}


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
async def test_a_replay_for_another_prompt_or_salt_serves_nothing(body: dict[str, Any], again: dict[str, Any]) -> None:
    """The decode server computes the prompt itself, whatever a client adds to the field."""
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
async def test_an_edited_field_serves_nothing(change: dict[str, Any]) -> None:
    proxy, body = Proxy(), {"prompt": PROMPT}
    kv = await proxy.first(body)
    assert (await proxy.then(body, kv | change)).move == STAYS
    # Nor does a proof that anyone can write.
    made = kv | change
    digest = prompt_digest(PROMPT, "")
    for secret in ("", KEY, "p", kv["proof"]):
        made["proof"] = proof_of(secret, made["remote_request_id"], made["first_token"], digest)
        assert (await proxy.then(body, made)).move == STAYS
    other_start = await Proxy().first(body)
    assert (await proxy.then(body, other_start)).move == STAYS


async def test_a_streamed_prefill_ends_with_the_field() -> None:
    async with client(Ranks("p").app("prefill")) as http:
        answer = await http.post("/v1/completions", json={"prompt": PROMPT, "stream": True, **bring(ASK)})
    chunks = [line for line in answer.text.splitlines() if "kv_transfer_params" in line]
    assert len(chunks) == 1
    assert '"finish_reason":"length"' in chunks[0]


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
async def test_fields_that_do_not_suit_the_server(role: str, kv: dict[str, Any], words: str) -> None:
    ranks = Ranks("d")
    prefills = Prefills(["http://p"], ranks.engine, None, Network()) if role == "decode" else None
    async with client(ranks.app(role, prefills)) as http:
        answer = await http.post("/v1/completions", json=bring(kv))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "kv_transfer_params")
    assert words in answer.text
    assert not ranks.commands
