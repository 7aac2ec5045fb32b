"""Many streams at once, clients that go away, and what is left of them: nothing. A benchmark names what it loses."""

import asyncio
import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.http_load import describe_lost, drive
from benchmarks.load import Load
from tests.support.launchers import free_port, run_forked, unattended
from tests.support.servers import AUTHORIZED, KEY, MAX_MODEL_LEN, RunningServer, read_events
from tests.support.waiting import wait_until

NUM_STREAMS = 100  # more than run at once


def bodies() -> list[dict[str, Any]]:
    """Return requests of many lengths, half of them greedy."""
    draw = random.Random(7)
    made = []
    for number in range(NUM_STREAMS):
        facts = "".join(
            f"amber-{draw.choice(['ant', 'bee', 'apple'])} {draw.randrange(99)}; " for _ in range(number % 12)
        )
        prompt = f"{facts}amber-ant {number}; amber-ant?"
        temperature = number % 2
        made.append({"prompt": prompt, "max_tokens": 1 + number % 9, "temperature": temperature, "seed": number})
    return made


def generated(model: Path, directory: Path, requests: list[dict[str, Any]]) -> list[str]:
    """Return what `generate` answers. A server draws from the stream of a request's first choice."""
    lines = [
        {
            "id": number,
            "prompt": body["prompt"],
            "max_new_tokens": body["max_tokens"],
            "temperature": body["temperature"],
            "seed": body["seed"] << 31,
        }
        for number, body in enumerate(requests)
    ]
    files = directory / "in.jsonl", directory / "out.jsonl"
    files[0].write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--device", "cpu", "--dtype", "float32", "--prompt-file", files[0], "--output-file", files[1]]
    run_forked(unattended(["-m", "dcpmla", "generate", "--model", model, *options], 1))
    outputs = {output["id"]: output["text"] for output in map(json.loads, files[1].read_text().splitlines())}
    return [outputs[number] for number in range(len(requests))]


async def stream(client: httpx2.AsyncClient, body: dict[str, Any], num_chunks: int | None) -> str | None:
    """Return a streamed answer; None where the client leaves after some chunks."""
    lines = []
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        assert response.status_code == 200
        if num_chunks == 0:
            return None
        async for line in response.aiter_lines():
            lines.append(line)
            if num_chunks is not None and len(lines) >= 2 * num_chunks:
                return None
    return "".join(choice["text"] for chunk in read_events(lines) for choice in chunk["choices"])


async def test_every_answer_is_generate_s(server: RunningServer, model: Path, tmp_path: Path) -> None:
    requests = bodies()
    leaves = [random.Random(number).choice([0, 1, 2]) if number % 4 == 3 else None for number in range(NUM_STREAMS)]
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=server.url, headers=AUTHORIZED, timeout=120, limits=limits) as client:
        answers = await asyncio.gather(*map(partial(stream, client), requests, leaves))
    expected = generated(model, tmp_path, requests)
    for answer, leave, text in zip(answers, leaves, expected, strict=True):
        assert answer == (text if leave is None else answer)
        assert leave is not None or answer is not None
    wait_until(lambda: server.metric("requests_running") == 0, "requests are left")
    assert server.metric("kv_cache_use") == 0
    assert server.metric("requests_waiting") == 0


def load(*input_lens: int) -> Load:
    """Return requests that come one after the other, with 7 new tokens each."""
    arrival_times = [0.02 * index for index in range(len(input_lens))]
    return Load(arrival_times, [[1 + index] * num for index, num in enumerate(input_lens)], [7] * len(input_lens))


def test_nothing_is_lost(server: RunningServer) -> None:
    requests = load(16, 60, 16)
    answers = drive(server.url, requests, KEY, {"return_token_ids": True})
    assert describe_lost(answers) == ""
    assert [answer.arrival_time for answer in answers] == requests.arrival_times
    for answer in answers:
        assert (answer.num_tokens, len(answer.token_times)) == (7, 7)
        assert answer.first_token_time is not None
        assert answer.arrival_time < answer.first_token_time == answer.token_times[0]
        assert answer.token_times == sorted(answer.token_times)
        assert answer.token_times[-1] <= answer.finish_time


def test_what_is_lost(server: RunningServer) -> None:
    """A prompt too long for the server, a wrong key, and a server that is not there."""
    answers = drive(server.url, load(16, MAX_MODEL_LEN, 16), KEY)
    assert [bool(answer.error) for answer in answers] == [False, True, False]
    assert describe_lost(answers).startswith("1 of 3 are lost: 1 x status 400")
    answers = drive(server.url, load(16, 16, 16), "wrong")
    assert describe_lost(answers).startswith("3 of 3 are lost: 3 x status 401")
    answers = drive(f"http://localhost:{free_port()}", load(16, 16), KEY)
    assert [answer.num_tokens for answer in answers] == [0, 0]
    assert describe_lost(answers).startswith("2 of 2 are lost: ")
