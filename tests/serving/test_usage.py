"""The values of usage and of /metrics: tokens that prefix reuse saved, and times, on a server and on a known clock."""

import json
import time
from typing import Any

import pytest

from dcpmla.serving.answers import Answers
from dcpmla.serving.messages import Output, Report
from dcpmla.serving.metrics import Metrics, Timings
from dcpmla.serving.prompts import Prompt
from dcpmla.serving.protocol import CompletionBody
from tests.support.servers import RunningServer

BLOCK = 32  # tokens, over two ranks
PROMPT = " ".join(f"amber-cat{number} 5;" for number in range(60))
MESSAGES = [{"role": "user", "content": PROMPT}]
STREAMED = {"stream_options": {"include_usage": True}}
ROUTES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # fields of a body, and those of a stream's
    "/v1/completions": ({"prompt": PROMPT, "max_tokens": 3}, STREAMED),
    "/v1/chat/completions": ({"messages": MESSAGES, "max_tokens": 3}, STREAMED),
    "/v1/responses": ({"input": PROMPT, "max_output_tokens": 3}, {}),
    "/v1/messages": ({"messages": MESSAGES, "max_tokens": 3}, {}),
}
TIMES = ("time_to_first_token_seconds", "request_seconds")


def ask(client: Any, path: str, salt: str, streams: bool) -> tuple[int, int]:
    """Return the number of the prompt's tokens, and how many of them were cached."""
    body, more = ROUTES[path]
    answer = client.post(path, json={**body, "cache_salt": salt, "stream": streams, **(more if streams else {})})
    assert answer.status_code == 200, answer.text
    texts = [answer.text]
    if streams:
        texts = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    values = list(map(json.loads, texts))
    usages = [usage for value in values if (usage := value.get("response", value).get("usage"))]
    usage: dict[str, Any] = usages[-1]
    if path == "/v1/messages":
        usage = values[0].get("message", values[0])["usage"] | usage
        assert usage["cache_creation_input_tokens"] == 0
        cached = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + cached, cached
    kind = "input" if path == "/v1/responses" else "prompt"
    return usage[f"{kind}_tokens"], usage[f"{kind}_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", ROUTES)
def test_what_reuse_saves(server: RunningServer, client: Any, path: str, streams: bool) -> None:
    def totals() -> dict[str, float]:
        times = [f"{name}_{kind}" for name in TIMES for kind in ("count", "sum")]
        names = ["prompt_tokens_total", "cached_prompt_tokens_total", *times]
        return {name: server.metric(name) for name in names}

    salt = f"{path} {streams}"
    before, started = totals(), time.monotonic()
    (length, cached), again = (ask(client, path, salt, streams) for _ in range(2))
    elapsed = time.monotonic() - started
    assert length > 3 * BLOCK
    assert (cached, again) == (0, (length, (length - 1) // BLOCK * BLOCK))
    after = totals()
    gained = {name: after[name] - before[name] for name in before}
    assert gained["prompt_tokens_total"] == 2 * length
    assert gained["cached_prompt_tokens_total"] == again[1]
    assert [gained[f"{name}_count"] for name in TIMES] == [2, 2]
    first, whole = (gained[f"{name}_sum"] for name in TIMES)
    assert 0 < first < whole < elapsed


def test_choices_have_the_tokens_of_their_prompt_in_common() -> None:
    texts: Any = None
    answers = Answers(CompletionBody(prompt="", n=2), texts, "m", [Prompt([1, 2], ""), Prompt([3, 4, 5], "")])
    for index, num_cached in enumerate((1, 2, 2, 2)):
        answers.add(index, Output(index, "a", (5,), finish_reason="stop", num_cached_tokens=num_cached))
    details = {"cached_tokens": 1 + 2}
    total = {"prompt_tokens": 2 + 3, "completion_tokens": 4, "total_tokens": 9, "prompt_tokens_details": details}
    assert answers.whole()["usage"] == total


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"dcpmla_{name}", labels)


def test_times_and_ends_of_requests() -> None:
    """Two requests of one submission: their first tokens after 2 and 5 s, three and one tokens in all."""
    metrics, timings = Metrics(), Timings(100.0, {1: 100, 2: 40, 3: 9, 4: 9})
    for now, output in (
        (102.0, Output(1, "a", (5,), num_cached_tokens=64)),
        (105.0, Output(2, "b", (6,), finish_reason="length", num_cached_tokens=32)),
        (106.0, Output(1, "c", (7,), num_cached_tokens=64)),
        (110.0, Output(1, "d", (8,), finish_reason="stop", num_cached_tokens=64)),
    ):
        metrics.observe(output, timings, now)
    expected = {
        "prompt_tokens_total": 140,
        "cached_prompt_tokens_total": 96,
        "generation_tokens_total": 4,
        "time_to_first_token_seconds_count": 2,
        "time_to_first_token_seconds_sum": 7,
        "request_seconds_count": 2,
        "request_seconds_sum": 15,
        "time_per_output_token_seconds_count": 1,
        "time_per_output_token_seconds_sum": 4,
    }
    assert {name: value(metrics, name) for name in expected} == expected
    for limit, number in (("1.0", 0), ("2.5", 1), ("5.0", 2)):
        assert value(metrics, "time_to_first_token_seconds_bucket", le=limit) == number
    for request_id, reason in ((3, "length"), (4, None)):
        metrics.observe(Output(request_id, "e", (5,), finish_reason=reason), timings, 111.0)
    ends = {reason: value(metrics, "requests_total", finish_reason=reason) for reason in ("stop", "length", "abort")}
    assert ends == {"stop": 1, "length": 2, "abort": None}


def test_phases_of_requests() -> None:
    """A request waits 1 s, has its first tokens after 3 s, and ends with drafts 2 and 6 s later; another is aborted."""
    metrics, timings = Metrics("vllm", "m"), Timings(100.0, {1: 70, 2: 9})
    for now, output in (
        (103.0, Output(1, "a", (5, 6), num_cached_tokens=64, queue_seconds=1.0)),
        (105.0, Output(1, "b", (7,), num_cached_tokens=64, queue_seconds=1.0)),
        (109.0, Output(1, "c", (8, 9, 10), finish_reason="stop", num_cached_tokens=64, queue_seconds=1.0)),
        (110.0, Output(2, finish_reason="abort")),
    ):
        metrics.observe(output, timings, now)

    def sample(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"vllm:{name}", {"model_name": "m", "engine": "0", **labels})

    sums = {
        "request_queue_time_seconds": 1,
        "request_prefill_time_seconds": 2,
        "request_decode_time_seconds": 6,
        "request_inference_time_seconds": 8,
        "request_time_per_output_token_seconds": 6 / 5,
        "request_generation_tokens": 6,
        "time_to_first_token_seconds": 3,
        "inter_token_latency_seconds": 6,
        "e2e_request_latency_seconds": 9 + 10,
        "request_prompt_tokens": 79,
    }
    assert {name: sample(f"{name}_sum") for name in sums} == pytest.approx(sums)
    assert sample("request_success_total", finished_reason="abort") == 1
    assert sample("request_queue_time_seconds_count") == 1
    for limit, number in (("1.0", 0), ("2.5", 1), ("5.0", 2), ("+Inf", 2)):
        assert sample("inter_token_latency_seconds_bucket", le=limit) == number


def test_totals_are_counted_once() -> None:
    metrics, tier, move = Metrics(), ("kv_offload_blocks", "host", "load"), ("kv_transfer_requests", "received", "done")
    for total in (3, 3, 5):
        totals = {("preemptions",): total, ("draft_tokens",): 2 * total, tier: total, move: total}
        metrics.state(Report([], 0, 1, 2, 0.5, totals))
    assert value(metrics, "preemptions_total") == 5
    assert value(metrics, "draft_tokens_total") == 10
    assert value(metrics, "kv_offload_blocks_total", tier="host", direction="load") == 5
    assert value(metrics, "kv_transfer_requests_total", direction="received", outcome="done") == 5
    assert [value(metrics, name) for name in ("requests_running", "requests_waiting", "kv_cache_use")] == [1, 2, 0.5]
