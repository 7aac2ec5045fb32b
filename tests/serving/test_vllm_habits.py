"""A server that is started and watched as vLLM's are: its options, its metrics, what a router learns of its cache."""

import json
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import httpx2
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.launchers import free_port
from tests.support.servers import AUTHORIZED, KEY, RunningServer, serve
from tests.support.waiting import LATE, wait_until

pytest.importorskip("zmq")
from tests.support.kv_router import BLOCK_TOKENS, BlockStored, Router, numbers_of  # noqa: E402

NUM_BLOCKS = 6  # of a prompt
CACHE_BYTES = 1 << 18  # few blocks
TOPIC = "kv@needle"
OPTIONS = (
    "--trust-remote-code --enable-auto-tool-choice --swap_space 4 --disable-log-requests --pipeline-parallel-size 1 "
    "--seed 0 --max_model_len 1024 --max-num-seqs 8 --dtype float --metrics-names vllm "
    "--default-chat-template-kwargs.suffix 123 --served-model-name needle deepseek/needle"
)


@pytest.fixture(scope="module")
def ports() -> tuple[int, int]:
    return free_port(), free_port()


@pytest.fixture(scope="module")
def publishing(
    model: Path, ports: tuple[int, int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """Serve with options of vLLM."""
    endpoint, replay = (f"tcp://*:{port}" for port in ports)
    config = {"enable_kv_cache_events": True, "endpoint": endpoint, "replay_endpoint": replay, "topic": TOPIC}
    options = ["--api-key", KEY, "--kv-cache-memory-bytes", CACHE_BYTES, *OPTIONS.split()]
    directory = tmp_path_factory.mktemp("habits")
    with serve(directory, model, 2, *options, "--kv-events-config", json.dumps(config)) as running:
        yield running


@pytest.fixture(scope="module")
def client(publishing: RunningServer) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=publishing.url, headers=AUTHORIZED, timeout=LATE) as opened:
        yield opened


@pytest.fixture
def router(ports: tuple[int, int]) -> Iterator[Router]:
    router = Router(*ports, TOPIC)
    yield router
    router.close()


def prompt_of(number: int) -> list[int]:
    """Return the tokens of a prompt that begins as no other one."""
    return Random(number).choices(range(100), k=NUM_BLOCKS * BLOCK_TOKENS + 5)


def test_a_router_knows_what_a_server_has(publishing: RunningServer, client: httpx2.Client, router: Router) -> None:
    """It predicts how many tokens each request finds, over evictions."""

    def ask(prompt: Sequence[int], salt: str = "") -> int:
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, **({"cache_salt": salt} if salt else {})}
        usage = client.post("/v1/completions", json=body).json()["usage"]
        cached: int = usage["prompt_tokens_details"]["cached_tokens"]
        return cached

    def ask_and_follow(prompt: Sequence[int], salt: str = "") -> int:
        """Ask, and wait for the event of the prompt's last block."""
        num_cached = ask(prompt, salt)

        def has_come() -> bool:
            router.receive()
            router.take_all()
            return len(router.find(prompt, salt)) == NUM_BLOCKS

        wait_until(has_come, "the blocks of a prompt have no event")
        return num_cached

    # A subscription takes a moment. What came before it is replayed.
    early = 1000
    while not router.frames:
        ask(prompt_of(early := early + 1))
        router.receive(200)
    router.frames[:0] = router.replay(0)[: numbers_of(router.frames)[0]]

    first = prompt_of(1)
    assert ask_and_follow(first) == 0
    found = router.find(first)
    assert len(found) == NUM_BLOCKS
    before = len(router.events)
    assert ask_and_follow(first) == NUM_BLOCKS * BLOCK_TOKENS
    assert ask_and_follow(first, "secret") == 0
    stored = [event for event in router.events[before:] if isinstance(event, BlockStored)]
    assert len(router.find(first, "secret")) == NUM_BLOCKS, "a salt makes other blocks"
    assert [event.extra_keys for event in stored] == [[("secret",), *[None] * (NUM_BLOCKS - 1)]]
    assert all(router.num_stored[each] == 1 for each in found), "a second request stores nothing"

    other = 2
    while any(each in router.blocks for each in found):
        prompt = prompt_of(other := other + 1)
        assert router.find(prompt) == []
        assert ask_and_follow(prompt) == 0
    assert ask_and_follow(first) == 0, "all of it was removed"
    assert router.find(first) == found
    assert [router.num_stored[each] for each in found] == [2] * NUM_BLOCKS
    predicted = set[int]()
    for number in range(other - 8, other + 1):
        prompt = prompt_of(number)
        predicted.add(num_found := len(router.find(prompt)))
        assert ask_and_follow(prompt) == BLOCK_TOKENS * num_found
    assert {0, NUM_BLOCKS} < predicted, "whole, gone, and in part"

    assert [frames[0] for frames in router.frames] == [TOPIC.encode()] * len(router.frames)
    assert numbers_of(router.frames) == list(range(len(router.frames)))
    router.receive()
    assert router.replay(0) == router.frames
    assert router.replay(7) == router.frames[7:]
    batch = msgspec.msgpack.decode(router.frames[-1][2])
    assert abs(batch[0] - time.time()) < 1000
    assert batch[2] == 0
    assert publishing.metric('kv_event_batches_total{outcome="dropped"}') == 0


def test_a_model_has_several_names(client: httpx2.Client) -> None:
    """Answers have the first one."""
    assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["needle", "deepseek/needle"]
    assert client.get("/v1/models/deepseek/needle").json()["id"] == "deepseek/needle"
    for name in (None, "needle", "deepseek/needle"):
        answer = client.post("/v1/completions", json={"prompt": [5, 6], "max_tokens": 1, "model": name})
        assert answer.json()["model"] == "needle"
    refused = client.post("/v1/completions", json={"prompt": [5, 6], "max_tokens": 1, "model": "other"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


def test_options_without_effect_are_logged_once(publishing: RunningServer) -> None:
    """Options that ask for what happens anyway are not."""
    notes = re.findall(r"^\S+ \S+ WARNING (\S+) has no effect: ", publishing.log(), re.MULTILINE)
    assert notes == ["--trust-remote-code", "--swap-space", "--seed"]


def test_variables_of_the_template_have_defaults(client: httpx2.Client) -> None:
    """A request's own win."""

    def tokens(**body: Any) -> list[int]:
        ids: list[int] = client.post("/tokenize", json=body).json()["tokens"]
        return ids

    messages, texts = [{"role": "user", "content": "amber-ant "}], ("amber-ant 123", "amber-ant 456")
    plain, other = (tokens(prompt=text, add_special_tokens=False) for text in texts)
    assert plain != other
    assert tokens(messages=messages) == plain
    assert tokens(messages=messages, chat_template_kwargs={"suffix": "456"}) == other


def test_metrics_under_vllms_names(publishing: RunningServer, client: httpx2.Client) -> None:
    """Numbers of requests as they were answered, with vLLM's labels; what vLLM does not measure keeps its name."""

    def scrape() -> dict[tuple[str, str], float]:
        """Return the values by name and by the labels that not all of vLLM's metrics have."""
        values: dict[tuple[str, str], float] = {}
        for family in text_string_to_metric_families(client.get("/metrics").text):
            for sample in family.samples:
                labels = dict(sample.labels)
                if sample.name.startswith("vllm:"):
                    assert (labels.pop("model_name"), labels.pop("engine")) == ("needle", "0")
                else:
                    assert sample.name.startswith("dcpmla_")
                values[sample.name, ",".join(f"{name}={value}" for name, value in labels.items())] = sample.value
        return values

    before, prompt = scrape(), prompt_of(5000)
    usages = [
        client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 3, "temperature": 0}).json()["usage"]
        for _ in range(2)
    ]
    wait_until(lambda: scrape()["vllm:num_requests_running", ""] == 0, "the server is not idle")
    after = scrape()
    gained = {name: value - before.get((name, labels), 0) for (name, labels), value in after.items() if not labels}
    num_cached = usages[1]["prompt_tokens_details"]["cached_tokens"]
    assert num_cached == NUM_BLOCKS * BLOCK_TOKENS
    expected = {
        "vllm:prompt_tokens_total": 2 * len(prompt),
        "vllm:prefix_cache_queries_total": 2 * len(prompt),
        "vllm:prefix_cache_hits_total": num_cached,
        "vllm:prompt_tokens_cached_total": num_cached,
        "vllm:generation_tokens_total": sum(usage["completion_tokens"] for usage in usages),
        "vllm:num_preemptions_total": 0,
        "vllm:num_requests_waiting": 0,
        "vllm:spec_decode_num_drafts_total": 0,
        "vllm:time_to_first_token_seconds_count": 2,
        "vllm:e2e_request_latency_seconds_count": 2,
        "vllm:request_queue_time_seconds_count": 2,
        "vllm:request_prompt_tokens_sum": 2 * len(prompt),
        "vllm:request_generation_tokens_sum": sum(usage["completion_tokens"] for usage in usages),
        "vllm:inter_token_latency_seconds_count": sum(usage["completion_tokens"] - 1 for usage in usages),
    }
    assert {name: gained[name] for name in expected} == expected
    times = {name: gained[f"vllm:{name}_seconds_sum"] for name in ("request_queue_time", "request_prefill_time")}
    assert sum(times.values()) == pytest.approx(gained["vllm:time_to_first_token_seconds_sum"])
    assert gained["vllm:request_decode_time_seconds_sum"] == pytest.approx(
        gained["vllm:inter_token_latency_seconds_sum"]
    )
    ends = {
        labels: value - before.get((name, labels), 0)
        for (name, labels), value in after.items()
        if name == "vllm:request_success_total"
    }
    assert ends["finished_reason=length"] + ends.get("finished_reason=stop", 0) == 2
    (info,) = (labels for name, labels in after if name == "vllm:cache_config_info")
    assert info.startswith(f"block_size={BLOCK_TOKENS},num_gpu_blocks=")
    assert 0 <= after["vllm:kv_cache_usage_perc", ""] <= 1
    assert not [name for name, _ in after if name.startswith("dcpmla_request")]
