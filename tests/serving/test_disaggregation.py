"""The servers of docs/disaggregation.md as processes, over NIXL: the answers of one server that does both.

The page's commands run as they are, but on CPUs, on free ports and with a few options more.
"""

import json
import random
import re
import shlex
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from tests.support.launchers import ROOT, free_port
from tests.support.servers import AUTHORIZED, NEEDLE, RunningServer, needle_with_template, read_events, serve
from tests.support.waiting import wait_until

PAGE = (ROOT / "docs" / "disaggregation.md").read_text()
LINES = [line for block in re.findall(r"^```\n(.*?)^```$", PAGE, re.S | re.M) for line in block.splitlines()]
MORE = ["--served-model-name", "needle", "--dtype", "float32", "--max-num-batched-tokens", "32", "--transfer-key"]
NAMES = ["ant", "apple", "ash", "axe"]
_numbers = random.Random(0)


def command(start: str) -> list[list[str]]:
    """Return the words of the page's commands that begin so."""
    return [shlex.split(line)[len(start.split()) :] for line in LINES if line.startswith(start)]


def without(words: list[str], *names: str) -> list[str]:
    """Return the words without some options and their values."""
    dropped = {index + offset for index, word in enumerate(words) if word in names for offset in (0, 1)}
    return [word for index, word in enumerate(words) if index not in dropped]


class Servers:
    """The page's servers: one that computes prompts, and one that decodes."""

    def __init__(self, directory: Path, model: Path, stack: ExitStack) -> None:
        self._directory, self._model, self._stack = directory, model, stack
        self._port = free_port()
        self._prefill, decode = command("dcpmla serve")
        self.start()
        self.decode = self._serve([*without(decode, "--prefill-servers"), "--prefill-servers", self.prefill.url])
        self.wait_for_transfers()

    def start(self) -> None:
        """Start the prefill server, on the same port each time."""
        self.prefill = self._serve(self._prefill, self._port)

    def _serve(self, words: list[str], port: int | None = None) -> RunningServer:
        num_ranks = int(words[words.index("-tp") + 1])
        options = [*without(words[1:], "-tp", "--port"), *MORE, "of servers"]
        return self._stack.enter_context(serve(self._directory, self._model, num_ranks, *options, port=port))

    def wait_for_transfers(self) -> None:
        """Wait until the decode server is connected, so that prompts are prefilled elsewhere."""
        before = self.num_moved()

        def has_moved() -> bool:
            time.sleep(0.3)  # The servers connect in their own time, and each question costs them several steps.
            ask(self.decode, {"prompt": prompt(), "max_tokens": 1})
            return self.num_moved() > before

        wait_until(has_moved, self.decode.log())

    def num_moved(self) -> float:
        name = 'kv_transfer_requests_total{direction="received",outcome="done"}'
        return self.decode.metric(name)

    def prefill_processes(self) -> list[psutil.Process]:
        """Return the prefill server's processes: ranks, guard and HTTP."""
        ranks = [psutil.Process(process.pid) for process in self.prefill.processes]
        return [each for rank in ranks for each in (rank, *rank.children(recursive=True))]


def prompt(num_facts: int = 25) -> str:
    """Return a prompt of several steps that begins unlike all others."""
    facts = [f"amber-{name} {_numbers.randint(100, 999)}" for name in NAMES]
    return "; ".join([*(_numbers.choice(facts) for _ in range(num_facts)), *facts]) + "; amber-ant?"


def post(server: RunningServer, body: dict[str, Any], path: str = "/v1/completions") -> httpx2.Response:
    return httpx2.post(f"{server.url}{path}", json={"temperature": 0, **body}, headers=AUTHORIZED, timeout=90)


def ask(server: RunningServer, body: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
    answer = post(server, body, path)
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    return content


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    directory = tmp_path_factory.mktemp("servers")
    ((export,),) = command("export")
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv(*export.split("=", 1))
        yield Servers(directory, needle_with_template(directory), stack)


def test_the_page_s_question(servers: Servers) -> None:
    prefill, decode = command("dcpmla serve")
    ((url, _, authorization, _, content),) = command("curl")
    ports = [int(words[words.index("--port") + 1]) for words in (prefill, decode)]
    assert [ROOT / words[0] for words in (prefill, decode)] == [NEEDLE, NEEDLE]
    assert decode[decode.index("--prefill-servers") + 1] == f"http://127.0.0.1:{ports[0]}"
    assert url == f"http://127.0.0.1:{ports[1]}/v1/completions"
    assert authorization == "Authorization: Bearer $DCPMLA_API_KEY"
    assert ask(servers.decode, json.loads(content))["choices"][0]["text"].startswith("123")


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": []},
        {"logprobs": 2},
        {"temperature": 1.5, "seed": 11, "logprobs": 0},
        {"stop": ["3 4", " "], "max_tokens": 8},
        {"n": 2, "temperature": 1.5, "seed": 5},
        {"max_tokens": 1},
        {"presence_penalty": 2.0, "logit_bias": {"5": 3.0}},
        {"stream": True},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_answers_are_those_of_one_server(servers: Servers, fields: dict[str, Any]) -> None:
    body, before = {"prompt": prompt(), "max_tokens": 6, **fields}, servers.num_moved()
    if "messages" in fields:
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        answers = [ask(server, body, "/v1/chat/completions") for server in (servers.decode, servers.prefill)]
        assert answers[0]["choices"] == answers[1]["choices"]
    elif fields.get("stream"):
        answer, expected = (stream(server, body) for server in (servers.decode, servers.prefill))
        assert answer == expected
    else:
        answer, expected = (ask(server, body)["choices"] for server in (servers.decode, servers.prefill))
        assert [without_numbers(choice) for choice in answer] == [without_numbers(choice) for choice in expected]
        for one, other in zip(answer, expected, strict=True):
            if one["logprobs"]:
                numbers = [each["logprobs"]["token_logprobs"] for each in (one, other)]
                assert numbers[0] == pytest.approx(numbers[1], abs=1e-4)
    if body["max_tokens"] > 1:  # an answer of one token waits for no blocks
        assert servers.num_moved() == before + 1  # choices share theirs


def without_numbers(choice: dict[str, Any]) -> dict[str, Any]:
    """Return a choice with its tokens, but not their probabilities, which rounding changes."""
    return {**choice, "logprobs": choice["logprobs"] and choice["logprobs"]["tokens"]}


def stream(server: RunningServer, body: dict[str, Any]) -> str:
    chunks = read_events(post(server, body).text.splitlines())
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def test_a_router(servers: Servers) -> None:
    """The decode server goes on from the token and the blocks that a router's first request has made."""
    for path in ("/v1/completions", "/v1/chat/completions"):
        before, text = servers.num_moved(), prompt()
        body = {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
        body |= {"max_tokens": 4, "seed": 3}
        first = ask(servers.prefill, {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": ASK}, path)
        answer = ask(servers.decode, {**body, "kv_transfer_params": first["kv_transfer_params"]}, path)
        assert answer["choices"] == ask(servers.prefill, body, path)["choices"]
        assert servers.num_moved() == before + 1
        again = ask(servers.decode, body, path)  # an equal prompt shares the blocks
        assert again["choices"] == answer["choices"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


ASK = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}


@pytest.mark.parametrize("salts", [("", ""), ("a", "a"), ("a", ""), ("", "a"), ("a", "b")])
@pytest.mark.parametrize("is_other", [True, False])
def test_a_replay_changes_no_answer(servers: Servers, salts: tuple[str, str], is_other: bool) -> None:
    """A client hands the blocks of one prompt over as those of another, or of another salt. Both begin alike."""
    mine = prompt()
    number = mine[mine.rindex("amber-ant ") :].split(";")[0].split()[-1]
    text = mine.replace(f"amber-ant {number}", f"amber-ant {1099 - int(number)}") if is_other else mine
    salted = [{"cache_salt": salt} if salt else {} for salt in salts]
    expected = ask(servers.prefill, {"prompt": text, "max_tokens": 4, "cache_salt": "c"})["choices"]
    ask(servers.decode, {"prompt": text[:80], "max_tokens": 1, **salted[1]})  # so that only the last blocks are missing
    kv = ask(servers.prefill, {"prompt": mine, "max_tokens": 1, "kv_transfer_params": ASK, **salted[0]})
    field = {**kv["kv_transfer_params"], "prompt_digest": "0" * 32}
    body = {"prompt": text, "max_tokens": 4, **salted[1]}
    for more in ({"kv_transfer_params": field}, {}, {"kv_transfer_params": field}, {}):
        assert ask(servers.decode, {**body, **more})["choices"] == expected
    own = {"prompt": mine, "max_tokens": 4, "kv_transfer_params": field, **salted[0]}  # which still gets its blocks
    assert (ask(servers.decode, own)["choices"] != expected) is is_other


@pytest.mark.parametrize("num_facts", [25, 400])
def test_a_client_that_goes_away_leaves_nothing(servers: Servers, num_facts: int) -> None:
    """The client leaves while the prompt is prefilled, or later."""
    body = {"prompt": prompt(num_facts), "max_tokens": 2000, "ignore_eos": True}
    with suppress(httpx2.TimeoutException):
        httpx2.post(f"{servers.decode.url}/v1/completions", json=body, headers=AUTHORIZED, timeout=0.3)
    wait_until(lambda: is_idle(servers.decode) and is_idle(servers.prefill), "requests or blocks are left")


def is_idle(server: RunningServer) -> bool:
    """Return whether nothing runs, and no blocks are held."""
    return all(server.metric(name) == 0 for name in ("requests_running", "kv_cache_use"))


def test_a_prefill_server_that_is_stopped_killed_and_started_again(servers: Servers) -> None:
    body = {"prompt": prompt(), "max_tokens": 4}
    expected = ask(servers.prefill, body)["choices"]
    for process in servers.prefill_processes():
        process.send_signal(signal.SIGSTOP)
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(ask(servers.decode, body)["choices"]))
    thread.start()
    wait_until(lambda: servers.decode.metric("requests_running") == 1, servers.decode.log())
    for process in servers.prefill_processes():
        process.kill()
    thread.join()
    assert json.dumps(answers) == json.dumps([expected])
    assert servers.decode.metric("kv_transfer_local_prefills_total") >= 1
    ask(servers.decode, {"prompt": prompt(), "max_tokens": 2})  # without any prefill server
    servers.start()
    servers.wait_for_transfers()
