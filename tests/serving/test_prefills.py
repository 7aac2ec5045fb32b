"""The decode server's prefill servers: connection, choice and faults, over applications in this process."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from msgspec.structs import replace
from starlette.responses import JSONResponse

from dcpmla.runtime.sampling import SamplingParams
from dcpmla.serving import prefills
from dcpmla.serving.background import Prepared
from dcpmla.serving.errors import ApiError
from dcpmla.serving.messages import Abort, Connect, Disconnect, First, Lose, Pull, Submit, Wanted, pack_tokens
from dcpmla.serving.prefills import Prefills
from tests.support.servers import KEY
from tests.support.transfer_servers import FIRST, Network, Ranks, job, layout, until

PARAMS = SamplingParams(max_new_tokens=9, seed=5, logprobs=1)


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefills, "_PERIOD", 0.02)
    monkeypatch.setattr(prefills, "LOST", 0.2)


class Decoder:
    """A decode server over prefill servers p0, p1, ...

    Args:
        answers: Whether the prefill servers' ranks answer.
    """

    def __init__(self, num_servers: int = 1, answers: bool = True) -> None:
        self.here = [Ranks(f"p{number}", answers) for number in range(num_servers)]
        self.network = Network(**{f"p{number}": ranks.app("prefill") for number, ranks in enumerate(self.here)})
        self.there = Ranks("d", answers=False)
        urls = [f"http://p{number}" for number in range(num_servers)]
        self.prefills = Prefills(urls, self.there.engine, KEY, self.network)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run a block with connected servers."""
        task = asyncio.create_task(self.prefills.run())
        try:
            await until(lambda: all(server.is_ready for server in self.prefills.servers))
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def submit(self, prompt: list[int]) -> Any:
        return self.there.engine.submit([prompt], PARAMS, 60)

    @asynccontextmanager
    async def wanting(self) -> AsyncIterator[Any]:
        """Run a block with connected servers, one of which has begun a prefill that the ranks want."""
        async with self.running():
            with self.submit([1]) as generation:
                self.want(generation, [1])
                await self.here[0].wait_for(Submit)
                yield generation

    def want(self, generation: Any, prompt: list[int]) -> int:
        """Let the ranks ask for another server's prefill of a request."""
        (request_id,) = generation.indices
        self.there.engine.on_wanted(Wanted(request_id, pack_tokens(prompt), PARAMS, "pepper"))
        return int(request_id)


async def test_a_prompt_gets_its_first_token() -> None:
    decoder = Decoder()
    async with decoder.running():
        with decoder.submit([1, 2]) as generation:
            request_id = decoder.want(generation, [1, 2])
            first = await decoder.there.wait_for(First)
        assert first == First(request_id, FIRST._replace(top=((7, -0.5), (8, -9999.0))))
    (connect,), (pull,) = decoder.there.of(Connect), decoder.there.of(Pull)
    (submit,) = decoder.here[0].of(Submit)
    assert connect == decoder.here[0].started.link
    assert (pull.engine, pull.handoff) == ("p0", submit.move.handoff)
    assert submit.params.max_new_tokens == 9
    assert submit.seeds == [5]
    assert submit.cache_salt == "pepper"
    assert not decoder.there.of(Lose)


async def test_the_same_beginning_has_the_same_server_unless_it_is_busy() -> None:
    decoder = Decoder(4)
    async with decoder.running():
        beginnings = [[number] * 300 for number in range(64)]
        requests = [[Wanted(9, pack_tokens([*each, end]), PARAMS, "") for end in range(3)] for each in beginnings]
        chosen = [{str(decoder.prefills.choose(each)) for each in alike} for alike in requests]
        assert {len(each) for each in chosen} == {1}
        assert min(Counter(str(each) for each in chosen).values()) > 4
        salted = [Wanted(9, pack_tokens(beginnings[0]), PARAMS, f"salt {number}") for number in range(64)]
        assert len({decoder.prefills.choose(each) for each in salted}) == 4  # nothing is shared over salts
        busy = decoder.prefills.choose(requests[0][0])
        assert busy is not None
        busy.num_open = 4
        assert decoder.prefills.choose(requests[0][0]) is busy
        busy.num_open = 5
        assert decoder.prefills.choose(requests[0][0]) is not busy


async def test_a_failed_server_is_tried_once_and_the_last_resort_is_this_one() -> None:
    decoder = Decoder(2)
    async with decoder.running():
        for number in range(2):  # they are healthy, but break each prefill
            decoder.network.apps[f"p{number}"] = _breaking(decoder.network.apps[f"p{number}"])
        with decoder.submit([1]) as generation:
            for number in range(3):
                decoder.want(generation, [1])
                lose = await decoder.there.wait_for(Lose, number + 1)
                assert lose.is_local == (number == 2)
        assert {pull.engine for pull in decoder.there.of(Pull)} == {"p0", "p1"}
        registry = decoder.there.engine.metrics.registry
        assert registry.get_sample_value("dcpmla_kv_transfer_local_prefills_total") == 1


def _breaking(app: Any) -> Any:
    """Return an application whose prefills end with a status of 500."""

    async def broken(scope: Any, receive: Any, send: Any) -> None:
        answer = JSONResponse({"error": {"message": "broken"}}, 500) if scope["path"] == "/kv/prefill" else app
        await answer(scope, receive, send)

    return broken


async def test_a_refused_prompt_is_refused_here() -> None:
    decoder = Decoder()
    async with decoder.running():
        with decoder.submit([1]) as generation:
            (request_id,) = generation.indices
            decoder.there.engine.on_wanted(Wanted(request_id, b"", PARAMS, ""))
            with pytest.raises(ApiError, match="prompt_token_ids") as error:
                async for _ in generation.outputs():
                    pass
    assert error.value.status == 400
    assert decoder.there.of(Abort) == [Abort([request_id])]


async def test_a_request_that_ends_closes_its_connection() -> None:
    decoder = Decoder(answers=False)
    async with decoder.running():
        with decoder.submit([1]) as generation:
            decoder.want(generation, [1])
            await decoder.here[0].wait_for(Submit)
            assert decoder.prefills.servers[0].num_open == 1
            (task,) = decoder.prefills._tasks.values()
        await until(lambda: not decoder.prefills.servers[0].num_open)
        await until(task.done)
        assert task.cancelled()
        assert not decoder.there.of(Lose)
        decoder.want(generation, [1])  # too late
        assert not decoder.prefills._tasks
        assert len(decoder.there.of(Pull)) == 1


async def test_a_server_that_starts_again_is_connected_again() -> None:
    decoder = Decoder(answers=False)
    async with decoder.wanting() as generation:
        del decoder.network.apps["p0"]
        await decoder.there.wait_for(Disconnect)
        assert not (await decoder.there.wait_for(Lose)).is_local
        decoder.want(generation, [1])  # no other server is left
        assert (await decoder.there.wait_for(Lose, 2)).is_local
        decoder.network.apps["p0"] = Ranks("again").app("prefill")
        assert (await decoder.there.wait_for(Connect, 2)).engine == "again"
        with decoder.submit([2]) as other:
            decoder.want(other, [2])
            await decoder.there.wait_for(First)


async def test_a_silent_server_is_lost() -> None:
    decoder = Decoder(answers=False)
    async with decoder.wanting():
        decoder.network.frozen.add("p0")
        await decoder.there.wait_for(Lose)
        assert decoder.there.of(Disconnect) == [Disconnect("p0")]
        decoder.network.frozen.clear()
        assert (await decoder.there.wait_for(Connect, 2)).engine == "p0"


async def test_a_server_that_forgot_this_one_is_connected_again() -> None:
    decoder = Decoder()
    async with decoder.running():
        decoder.network.apps["p0"] = Ranks("again").app("prefill")  # between two questions for its health
        with decoder.submit([1]) as generation:
            decoder.want(generation, [1])
            await decoder.there.wait_for(Lose)
            assert (await decoder.there.wait_for(Connect, 2)).engine == "again"


@pytest.mark.parametrize("answer", ["other cache", "another layout", "wrong key", "nonsense"])
async def test_a_server_that_does_not_suit_is_not_used(answer: str) -> None:
    decoder = Decoder()
    if answer == "other cache":
        other = replace(decoder.there.started, link=job("d", layout(row_bytes=32)))
        decoder.there.engine.prepared = Prepared(other, None)
    elif answer == "another layout":  # which the server itself has not compared
        decoder.network.apps["p0"] = httpx2.Response(
            200, json={**job("p0", layout(row_bytes=32)).json_fields(), "secret": "s"}
        )
    elif answer == "wrong key":
        decoder.prefills._client.headers["Authorization"] = "Bearer wrong"
    else:
        decoder.network.apps["p0"] = httpx2.Response(200, json=[1])
    task = asyncio.create_task(decoder.prefills.run())
    await until(lambda: len(decoder.network.paths) > 5)
    with decoder.submit([1]) as generation:
        decoder.want(generation, [1])
        assert (await decoder.there.wait_for(Lose)).is_local
    assert not decoder.there.of(Connect)
    task.cancel()
