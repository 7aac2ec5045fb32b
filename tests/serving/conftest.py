"""What the tests share: a server of two ranks and one cache, and an HTTP process over a fake engine."""

import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.support.fake_engine import AT_ONCE, AUTHORIZED, LATE, MEMORY, FakeEngine, wait_until
from tests.support.servers import KEY, MAX_MODEL_LEN, RunningServer, needle_with_template, serve


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
    options = [
        "--api-key",
        KEY,
        "--served-model-name",
        "needle",
        "--max-num-seqs",
        64,
        "--max-waiting",
        400,
        "--max-model-len",
        MAX_MODEL_LEN,
        "--dtype",
        "float32",
    ]
    with serve(tmp_path_factory.mktemp("server"), model, 2, *options) as running:
        yield running


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    until = time.monotonic() + LATE
    while time.monotonic() < until and not engine.is_healthy():
        time.sleep(0.1)
    yield engine
    engine.close()


@pytest.fixture
def within_limits(engine: FakeEngine) -> Iterator[None]:
    """Check that memory stays bounded, that no connection and no request is left, and that the server answers."""
    memory = engine.memory()
    yield
    assert engine.is_healthy()
    wait_until(lambda: engine.num_connections() == 0, "connections are left")
    wait_until(lambda: not engine.open, "requests are left")
    assert engine.memory() < memory + MEMORY
    answer = httpx2.post(f"{engine.url}/v1/completions", json={"prompt": [AT_ONCE]}, headers=AUTHORIZED)
    assert answer.json()["choices"][0]["text"] == "a"
