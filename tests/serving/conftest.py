"""What the tests share: servers of ranks, of a script and of threads in their place; tests that are coroutines."""

import asyncio
import inspect
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from dcpmla.serving.connections import Limits
from dcpmla.serving.messages import Started
from dcpmla.serving.settings import Settings
from tests.support.agent import TEMPLATE, answer
from tests.support.fake_ranks import AT_ONCE, FakeRanks, RunningScript, by_first_token
from tests.support.servers import AUTHORIZED, KEY, MAX_MODEL_LEN, RunningServer, needle_with_template, serve
from tests.support.small_tokenizers import scripted_tokenizer
from tests.support.waiting import wait_until

LIMITS = Limits(head_seconds=2, body_seconds=4, send_seconds=2, total_bytes=24 << 20)
MEMORY = 150 << 20  # bytes that a test may add to the process
OPTIONS = f"--api-key {KEY} --served-model-name needle --max-num-seqs 64 --max-waiting 400 --dtype float32"


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    """Let a test that is a coroutine run in an event loop of its own, for at most two minutes."""
    test = pyfuncitem.obj

    async def limited(**fixtures: object) -> None:
        async with asyncio.timeout(120):
            await test(**fixtures)

    if inspect.iscoroutinefunction(test):
        pyfuncitem.obj = lambda **fixtures: asyncio.run(limited(**fixtures))


@pytest.fixture(scope="package", autouse=True)
def no_certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hide the system's certificates: a client reads them in 40 ms, and no client here speaks HTTPS."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_DIR", str(tmp_path_factory.mktemp("certificates")))
        yield


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return needle_with_template(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="package")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    options = [*OPTIONS.split(), "--max-model-len", MAX_MODEL_LEN]
    with serve(tmp_path_factory.mktemp("server"), model, 2, *options) as running:
        yield running


@pytest.fixture(scope="package")
def client(server: RunningServer) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, headers=AUTHORIZED, timeout=120) as opened:
        yield opened


@pytest.fixture(scope="package")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningScript]:
    """Serve the script of an agent."""
    running = RunningScript(scripted_tokenizer(TEMPLATE), answer, tmp_path_factory.mktemp("scripted"))
    yield running
    running.close()


@pytest.fixture(scope="package")
def mute(scripted: RunningScript, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningScript]:
    """Run a server that answers nothing, and gives a request up after half a second."""
    directory = tmp_path_factory.mktemp("mute")
    running = RunningScript(scripted.tokenizer, answer, directory, is_mute=True, request_timeout=0.5)
    yield running
    running.close()


@pytest.fixture(scope="package")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeRanks]:
    """Run an HTTP process with short limits, without a tokenizer."""
    settings = Settings(name="model", api_key=KEY, request_timeout=30, max_waiting=4, drain_seconds=1)
    started = Started(str(tmp_path_factory.mktemp("nothing")), 1000, 10_000, 4, 20_000)
    running = FakeRanks(by_first_token, started, settings, LIMITS)
    yield running
    running.close()


@pytest.fixture
def _short_texts_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcpmla.serving.background._SMALL", 1 << 14)


@pytest.fixture
def within_limits(ranks: FakeRanks) -> Iterator[None]:
    """Check that memory stays bounded, that no connection and no request is left, and that the server answers."""
    memory = ranks.memory()
    yield
    assert ranks.is_healthy()
    wait_until(lambda: ranks.num_connections() == 0, "connections are left")
    wait_until(lambda: not ranks.open, "requests are left")
    assert ranks.memory() < memory + MEMORY
    reply = httpx2.post(f"{ranks.url}/v1/completions", json={"prompt": [AT_ONCE]}, headers=AUTHORIZED)
    assert reply.json()["choices"][0]["text"] == "a"
