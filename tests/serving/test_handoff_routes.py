"""The prefill server's routes, and a router's field on both servers, over a fake engine."""

import asyncio
from dataclasses import asdict
from typing import Any

import httpx2
import pytest

from dcpmla.runtime.sampling import SamplingParams
from dcpmla.serving.messages import Abort, Submit
from dcpmla.serving.prefills import Prefills
from dcpmla.serving.router import digest_of
from dcpmla.serving.transfer_messages import Connect, Disconnect
from tests.support.transfer_servers import FIRST, Network, Ranks, client, job, layout, until

PROMPT = [5, 6, 7]


def prefill_body(**changes: Any) -> dict[str, Any]:
    params = asdict(SamplingParams(max_new_tokens=9, seed=(1 << 64) - 1, temperature=0.5, logprobs=1))
    return {"handoff": "h", "engine": "d", "prompt_token_ids": PROMPT, "params": params, **changes}


def run(test: Any) -> None:
    asyncio.run(asyncio.wait_for(test, 120))


@pytest.mark.parametrize("path", ["/kv/connect", "/kv/prefill"])
def test_the_routes_need_the_key(path: str) -> None:
    async def test() -> None:
        ranks = Ranks("p")
        async with client(ranks.app("prefill"), "wrong") as http:
            assert (await http.post(path, json={})).status_code == 401
        assert not ranks.commands

    run(test())


@pytest.mark.parametrize("role", ["both", "decode"])
def test_other_roles_have_no_such_routes(role: str) -> None:
    async def test() -> None:
        async with client(Ranks("" if role == "both" else "d").app(role)) as http:
            for path, body in (("/kv/connect", vars(job("d"))), ("/kv/prefill", prefill_body())):
                answer = await http.post(path, json=body)
                assert (answer.status_code, "--role" in answer.text) == (404, True)

    run(test())


def test_a_decode_server_connects_once_until_it_starts_again() -> None:
    async def test() -> None:
        ranks = Ranks("p")
        async with client(ranks.app("prefill")) as http:
            for engine in ("d", "d", "d2"):
                answer = await http.post("/kv/connect", json=vars(job(engine)))
                assert Connect(**answer.json()) == ranks.started.link
        assert ranks.commands == [job("d"), job("d2")]

    run(test())


def test_decode_servers_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcpmla.serving.handoffs._MOST_PEERS", 2)

    async def test() -> None:
        ranks = Ranks("p")
        async with client(ranks.app("prefill")) as http:
            for engine in ("d", "e"):
                await http.post("/kv/connect", json=vars(job(engine)))
            assert (await http.post("/kv/prefill", json=prefill_body())).status_code == 200
            await http.post("/kv/connect", json=vars(job("f")))
        assert ranks.of(Disconnect) == [Disconnect("e")]

    run(test())


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"layout": layout(facts=(("dtype (--dtype)", "fp16"),)).to_json()}, 409, "dtype (--dtype) is bf16"),
        ({"layout": layout(row_bytes=32).to_json()}, 409, "prefill server"),
        ({"layout": {}}, 409, "layout"),
        ({"agents": ["AAAA", "AAAA"]}, 409, "agents are 2"),
        ({"agents": ["?"]}, 409, ""),
        ({"engine": "a/b"}, 400, "engine"),
    ],
)
def test_other_caches_do_not_connect(changes: dict[str, Any], status: int, words: str) -> None:
    async def test() -> None:
        ranks = Ranks("p")
        async with client(ranks.app("prefill")) as http:
            answer = await http.post("/kv/connect", json={**vars(job("d")), **changes})
        assert answer.status_code == status
        assert words in answer.json()["error"]["message"]
        assert not ranks.commands

    run(test())


def test_a_prompt_is_computed_with_its_own_seed() -> None:
    async def test() -> None:
        ranks = Ranks("p")
        async with client(ranks.app("prefill")) as http:
            assert (await http.post("/kv/prefill", json=prefill_body())).status_code == 409
            await http.post("/kv/connect", json=vars(job("d")))
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
            await http.post("/kv/connect", json=vars(job("d")))
            answer = await http.post("/kv/prefill", json=prefill_body(**changes))
        assert answer.status_code == 400
        assert not ranks.of(Submit)

    run(test())


def test_a_closed_connection_aborts_the_prompt() -> None:
    async def test() -> None:
        ranks = Ranks("p", answers=False)
        app = ranks.app("prefill")
        async with client(app) as http:
            await http.post("/kv/connect", json=vars(job("d")))
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
        prefills = Prefills(["http://p"], self.there.engine, None, Network())
        prefills.servers[0].engine = "p"
        self.prefill, self.decode = self.here.app("prefill"), self.there.app("decode", prefills)

    async def ask(self, path: str, body: dict[str, Any], **changes: Any) -> httpx2.Response:
        async with client(self.prefill) as http:
            first = {**body, "kv_transfer_params": ASK, "stream": False, "max_tokens": 1}
            first.pop("stream_options", None)
            answer = await http.post(path, json=first)
            assert answer.status_code == 200, answer.text
        kv = answer.json().get("kv_transfer_params", {})
        async with client(self.decode) as http:
            return await http.post(path, json={**body, "kv_transfer_params": {**kv, **changes}} if kv else body)


def test_a_router_s_request_has_its_first_token_from_the_prefill_server() -> None:
    async def test() -> None:
        proxy = Proxy()
        body = {"prompt": PROMPT, "max_tokens": 4, "stream": True, "seed": 3}
        assert (await proxy.ask("/v1/completions", body)).status_code == 200
        (here,), (there,) = proxy.here.of(Submit), proxy.there.of(Submit)
        assert there.move.source == ("p", here.move.handoff)
        assert there.move.first == FIRST._replace(logprob=None, top=())
        assert here.seeds == there.seeds

    run(test())


def test_several_answers_are_computed_by_the_decode_server() -> None:
    async def test() -> None:
        for body in ({"prompt": PROMPT, "n": 2}, {"prompt": [PROMPT, PROMPT]}):
            proxy = Proxy()
            assert (await proxy.ask("/v1/completions", body)).status_code == 200
            assert {submit.move.handoff for submit in proxy.here.of(Submit)} == {""}  # else their blocks would be held
            assert {submit.move.source for submit in proxy.there.of(Submit)} == {None}

    run(test())


def test_another_prompt_is_not_pulled() -> None:
    async def test() -> None:
        proxy = Proxy()
        answer = await proxy.ask("/v1/completions", {"prompt": PROMPT}, prompt_digest=digest_of([*PROMPT[:-1], 6]))
        assert answer.status_code == 200
        assert proxy.there.of(Submit)[0].move.source is None

    run(test())


def test_a_streamed_prefill_ends_with_the_field() -> None:
    async def test() -> None:
        async with client(Ranks("p").app("prefill")) as http:
            answer = await http.post("/v1/completions", json={"prompt": PROMPT, "stream": True, **bring(ASK)})
        chunks = [line for line in answer.text.splitlines() if "kv_transfer_params" in line]
        assert len(chunks) == 1
        assert '"finish_reason":"length"' in chunks[0]

    run(test())


@pytest.mark.parametrize(
    ("role", "kv", "words"),
    [
        ("both", ASK, "--role"),
        ("decode", ASK, "--role"),
        ("prefill", {"do_remote_prefill": True}, "--role"),
        ("decode", {"do_remote_prefill": True}, "remote_engine_id"),
        (
            "decode",
            {
                "do_remote_prefill": True,
                "remote_engine_id": "x",
                "remote_request_id": "h",
                "first_token": [1, None, []],
            },
            "--prefill-servers",
        ),
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


@pytest.mark.parametrize("token", [[1], ["a", None, []], [1, None, 3], [-1, None, []], [1000, None, []]])  # of 1,000
def test_wrong_first_tokens(token: list[Any]) -> None:
    async def test() -> None:
        proxy = Proxy()
        answer = await proxy.ask("/v1/completions", {"prompt": PROMPT}, first_token=token)
        assert answer.status_code == 400
        assert "first_token" in answer.text
        await until(lambda: not proxy.there.commands)

    run(test())
