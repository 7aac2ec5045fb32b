"""Lines of the log: one for each request after its last byte, few for strangers, one on the load while there is any."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import OpenAI

from dcpmla.cli import serve as serve_command
from dcpmla.serving.access import guarded
from dcpmla.serving.app import Api
from dcpmla.serving.background import prepare
from dcpmla.serving.client import Engine
from dcpmla.serving.connections import Limits
from dcpmla.serving.few_lines import FewLines
from dcpmla.serving.messages import Output, Report
from dcpmla.serving.metric_names import METRICS_NAMES
from dcpmla.serving.metrics import Metrics, Timings
from dcpmla.serving.request_log import RequestLog
from dcpmla.serving.settings import Settings
from dcpmla.serving.throughput import Throughput
from dcpmla.serving.worker import Worker
from tests.serving.test_client import make_engine
from tests.support.asgi import Client
from tests.support.servers import KEY, QUESTION, RunningServer, serve
from tests.support.waiting import wait_until

TOKENS = r"[89] prompt tokens, (\d+) new, the first after (\d+\.\d{3}) s"


class Log:
    """What a server has written since this was made."""

    def __init__(self, server: RunningServer) -> None:
        self._server, self._start = server, [len(path.read_text()) for path in server.logs]

    def text(self, *numbers: int) -> str:
        """Return the text of files with some numbers (output and errors of each rank), or of all."""
        texts = [path.read_text()[start:] for path, start in zip(self._server.logs, self._start, strict=True)]
        return "".join(texts[number] for number in numbers or range(len(texts)))

    def wait(self, pattern: str, number: int = 1) -> list[Any]:
        """Wait until lines match, and return what the last of them has in groups."""
        line = re.compile(rf"^\S+ \S+ INFO {pattern}$", re.MULTILINE)
        wait_until(lambda: len(line.findall(self.text())) >= number, f"no {number} lines {pattern!r}:\n{self.text()}")
        found = line.findall(self.text())
        assert len(found) == number
        return [found[-1]] if isinstance(found[-1], str) else [*found[-1]]


def body(**fields: object) -> dict[str, Any]:
    return {"prompt": QUESTION, "temperature": 0, **fields}


def test_a_line_for_each_request(server: RunningServer, client: httpx2.Client) -> None:
    log = Log(server)
    client.post("/v1/completions", json=body(max_tokens=3))
    num_new, first = log.wait(rf"127\.0\.0\.1 POST /v1/completions 200 in \d+\.\d{{3}} s: {TOKENS}")
    assert num_new == "3"
    assert float(first) > 0
    client.get("/v1/models")
    log.wait(r"127\.0\.0\.1 GET /v1/models 200 in \d+\.\d{3} s")
    client.post("/v1/completions", json=body(max_tokens=-1))
    log.wait(r"127\.0\.0\.1 POST /v1/completions 400 in \d+\.\d{3} s")
    client.post("/v1/completions", json=body(prompt=[QUESTION, QUESTION], n=2, max_tokens=2, temperature=1))
    log.wait(r"127\.0\.0\.1 POST /v1/completions 200 in \S+ s: 18 prompt tokens, 8 new, the first after \S+ s")


def test_the_line_of_a_stream_comes_after_its_last_byte(server: RunningServer) -> None:
    log, line = Log(server), rf"127\.0\.0\.1 POST /v1/chat/completions 200 in (\S+) s: {TOKENS}"
    openai = OpenAI(base_url=f"{server.url}/v1", api_key=KEY)
    messages: Any = [{"role": "user", "content": QUESTION}]
    more: Any = {"ignore_eos": True}
    stream = openai.chat.completions.create(
        model="needle", messages=messages, max_tokens=200, stream=True, extra_body=more
    )
    next(iter(stream))
    assert "POST" not in log.text()
    num_chunks = sum(1 for _ in stream)
    assert num_chunks > 1
    seconds, num_new, first = log.wait(line)
    assert num_new == "200"
    assert float(first) < float(seconds)


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_leaves_is_named(server: RunningServer, client: httpx2.Client, streams: bool) -> None:
    log = Log(server)
    endless = body(max_tokens=2000, ignore_eos=True, stream=streams)
    if streams:
        with client.stream("POST", "/v1/completions", json=endless) as answer:
            next(answer.iter_lines())
    else:
        with pytest.raises(httpx2.ReadTimeout):
            client.post("/v1/completions", json=endless, timeout=0.3)
    log.wait(r"127\.0\.0\.1 POST /v1/completions 499 in \S+ s: 9 prompt tokens, \d+ new.*")


def test_strangers_cause_few_lines_and_no_secret_is_written(server: RunningServer, client: httpx2.Client) -> None:
    log, path = Log(server), "/secret%0A2000-01-01%1b[31m" + 300 * "x"
    for _ in range(30):
        assert httpx2.get(f"{server.url}{path}?key={KEY}").status_code == 401
        assert httpx2.get(f"{server.url}/health").status_code == 200
    for _ in range(12):
        assert client.get(path).status_code == 404
    client.post("/v1/completions", json=body(prompt="amber-ant 123; amber-ant?", max_tokens=1, user="Ada"))
    client.get("/metrics")
    shown = rf"/secret\\n2000-01-01\\x1b\[31m{77 * 'x'}"
    log.wait(rf"127\.0\.0\.1 GET {shown} 404 in \S+ s", 12)
    log.wait(r"127\.0\.0\.1 POST /v1/completions 200 in .*")
    text = log.text()
    assert len(re.findall(rf"GET {shown} 401 in ", text)) <= 2 * 10  # Other tests may cause some, and a minute may end.
    for secret in (KEY, "amber", "Ada", "/health", "/metrics"):
        assert secret not in text


def test_the_rest_of_lines_like_others_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    now = [1000.0]
    few = FewLines(lambda: now[0])
    assert sum(few.admits("401 to clients without a key") for _ in range(1500)) == 10
    assert few.admits("404 to clients without a key")
    now[0] += 59
    few.tell()
    assert not few.admits("401 to clients without a key")
    assert not caplog.messages
    now[0] += 2
    assert few.admits("401 to clients without a key")
    assert caplog.messages == ["401 to clients without a key: 1,491 more within a minute"]
    now[0] += 61
    few.tell()
    assert len(caplog.messages) == 1


def logged(engine: Engine, **options: Any) -> RequestLog:
    settings = Settings(name="model", host="0.0.0.0", **options)
    return RequestLog(Api(engine, settings, Limits(), Worker(prepare)).app(), FewLines())


async def test_a_stream_that_ends_with_an_error_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    app = logged(make_engine()[0], request_timeout=1)
    client = Client(app, "/v1/completions", json.dumps({"prompt": [5, 6], "stream": True}).encode())
    await client.task
    (line,) = caplog.messages
    assert re.fullmatch(r"- POST /v1/completions 200, then 504 in \S+ s: 2 prompt tokens, 0 new", line)


async def test_a_mistake_of_the_server_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def fail(*arguments: Any) -> None:
        raise RuntimeError("a mistake")

    client = Client(RequestLog(fail, FewLines()), "/v1/models", b"")
    with pytest.raises(RuntimeError, match="a mistake"):
        await client.task
    (line,) = caplog.messages
    assert line.startswith("- POST /v1/models 500 in ")


async def test_probes_are_lines_of_the_level_debug(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    app = logged(make_engine()[0])
    for path in ("/ping", "/health", "/metrics"):  # The client posts, which the others do not take.
        await Client(app, path, b"").task
    found = [(record.levelname, *re.findall(r"POST (\S+) (\d+)", record.getMessage())) for record in caplog.records]
    assert found == [("DEBUG", ("/ping", "200")), ("DEBUG", ("/health", "405")), ("INFO", ("/metrics", "405"))]


async def test_only_a_right_key_is_known() -> None:
    seen: list[bool] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["state"]["has_key"])

    for settings, path, expected in (
        (Settings(name="m", api_key=KEY), "/v1/models", True),
        (Settings(name="m", api_key=KEY), "/health", False),
        (Settings(name="m", host="0.0.0.0"), "/v1/models", False),
    ):
        await Client(guarded(app, settings), path, b"", KEY).task
        assert seen.pop() is expected


@pytest.mark.parametrize("names", METRICS_NAMES)
def test_the_load_of_a_server_is_what_its_metrics_gained(names: str) -> None:
    metrics, now = Metrics(names, "m"), [50.0]
    throughput = Throughput(metrics, lambda: now[0])
    now[0] = 60.0
    assert throughput.line() == ""
    timings = Timings(50.0, {1: 3000, 2: 1000})
    for request_id, num_cached in ((1, 800), (2, 200)):
        metrics.observe(Output(request_id, "a", (5, 6), num_cached_tokens=num_cached), timings, 51.0)
    metrics.state(Report([], 0, 2, 1, 0.456, {("preemptions",): 3.0}))
    now[0] = 70.0
    assert throughput.line() == (
        "prompts 400.0 tokens/s (25% found in the cache), new 0.4 tokens/s; 2 running, 1 waiting, cache 45.6% used, "
        "3 preemptions"
    )
    now[0] = 80.0
    assert throughput.line() == (
        "prompts 0.0 tokens/s, new 0.0 tokens/s; 2 running, 1 waiting, cache 45.6% used, 0 preemptions"
    )
    metrics.state(Report([], 0, 0, 0, 0.0, {("preemptions",): 3.0}))
    now[0] = 90.0
    assert throughput.line() == ""


def test_a_server_says_what_it_does(model: Path, tmp_path: Path) -> None:
    """Its start, its load while it is busy, and its end; on the first rank alone, and without lines of requests."""
    options = ["--max-model-len", 2048, "--max-num-seqs", 7, "--speculative-method", "ngram", "--disable-access-log"]
    options += ["--drain-seconds", 1]
    with serve(tmp_path, model, 2, *options) as server:
        endless = body(max_tokens=2000, ignore_eos=True, stream=True)
        with httpx2.stream("POST", f"{server.url}/v1/completions", json=endless, timeout=120) as answer:
            lines = answer.iter_lines()
            wait_until(lambda: "running, " in (next(lines, ""), server.log())[1], "no line on the load", 0)
        with httpx2.stream("POST", f"{server.url}/v1/completions", json=endless, timeout=120) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.stop()
            assert [*lines]
        assert server.exit_codes() == [0, 0]
        out, errors, other_out, other_errors = (path.read_text() for path in server.logs)
    assert re.search(
        r"INFO prompts \S+ tokens/s.*, new \d\S* tokens/s; [01] running, 0 waiting, cache \S+% used,", errors
    )
    assert "POST" not in errors
    assert out == f"serving on {server.url}\n"
    assert other_out + other_errors == ""
    for pattern in (
        rf"loading {re.escape(str(model))}$",
        rf"model: {re.escape(str(model))} \(deepseek_v3\) in bfloat16",
        "layout: tp 2, dcp 2, interleave 1, block size 16$",
        "cache: .* tokens in .* blocks of 16 on each of 2 DCP ranks",
        r"room: (\d+) requests of the longest, 2,048 tokens, fit at once; .* is --kv-cache-memory-bytes 4,194,304",
        r"exchange: a2a \(auto: .*\)",
        "attention, decode: torch, the first that takes its calls",
        "attention, prefill: torch, the first that takes its calls",
        r"CUDA graphs: none \(CPUs have none\)",
        "steps: up to 8,192 tokens of 7 requests; prefixes are reused",
        "drafts: ngram, up to 3 of a request",
        "structured output: none; .*",
        r"ready \d+\.\d s later$",
        r"stopping: 1 open requests have 1 s \(--drain-seconds\)$",
    ):
        assert re.search(rf"^\S+ \S+ INFO {pattern}", errors, re.MULTILINE), pattern


@pytest.mark.parametrize(
    ("rank", "level", "lowest"),
    [(None, "debug", "DEBUG"), ("0", "error", "ERROR"), ("1", "info", "WARNING"), ("1", "error", "ERROR")],
)
def test_levels_of_the_log(rank: str | None, level: str, lowest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loggers = [logging.getLogger(name) for name in ("dcpmla", "")]
    levels = [logger.level for logger in loggers]
    monkeypatch.setattr(serve_command, "claimed_rank", lambda environment: rank)
    try:
        serve_command._set_up_log(level)
        assert logging.getLevelName(loggers[0].level) == lowest
        assert loggers[1].level >= logging.WARNING
    finally:
        for logger, before in zip(loggers, levels, strict=True):
            logger.setLevel(before)
