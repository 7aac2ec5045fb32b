"""Who may use the server: web pages, names of hosts; what the log says of strangers."""

import asyncio
import logging
from typing import Any

import httpx2
import pytest

from dcpmla.serving.access import guarded
from dcpmla.serving.few_lines import FewLines
from dcpmla.serving.settings import Settings
from tests.serving.test_client import make_api, make_engine


async def answer(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"prompts of others"})


def ask(app: Any, path: str = "/v1/models", **headers: str) -> httpx2.Response:
    async def get() -> httpx2.Response:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://localhost") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(get())


@pytest.mark.parametrize(("host", "status"), [
    ("localhost:8000", 200),
    ("LOCALHOST", 200),
    ("127.0.0.1:8000", 200),
    ("[::1]:8000", 200),
    ("[::1]", 200),
    ("evil.example", 403),
    ("evil.example:8000", 403),
    ("127.0.0.1.evil.example:80", 403),
    ("localhost:evil", 403),
])  # fmt: skip
def test_names_of_a_local_server_without_a_key(host: str, status: int) -> None:
    """A page may give its own name this address (DNS rebinding), and is then no page of another origin."""
    assert ask(guarded(answer, Settings(name="m")), Host=host).status_code == status
    assert ask(guarded(answer, Settings(name="m", allowed_origins=("*",))), Host=host).status_code == 200
    assert ask(guarded(answer, Settings(name="m", host="0.0.0.0")), Host=host).status_code == 200  # on an outer address
    assert ask(guarded(answer, Settings(name="m", api_key="k")), Host=host).status_code == 401


@pytest.mark.parametrize(
    ("allowed", "status"), [((), 403), (("https://a.example",), 403), (("https://b.example",), 200)]
)
def test_pages_of_other_origins_without_a_key(allowed: tuple[str, ...], status: int) -> None:
    response = ask(guarded(answer, Settings(name="m", allowed_origins=allowed)), Origin="https://b.example")
    assert response.status_code == status
    assert ("access-control-allow-origin" in response.headers) == (status == 200)
    assert ask(guarded(answer, Settings(name="m", allowed_origins=allowed))).status_code == 200


def test_no_redirect_names_the_host_of_a_request() -> None:
    engine, _ = make_engine()
    app = make_api(engine).app()
    for path in ("/metrics/", "/health/", "/v1/completions/"):
        response = ask(app, path, Host="evil.example")
        assert response.status_code == 404
        assert "location" not in response.headers


def test_lines_of_a_library_that_strangers_cause_are_few(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    now = [0.0]
    logger, few = logging.getLogger("a server's"), FewLines(lambda: now[0])
    logger.addFilter(few)
    for _ in range(1000):
        logger.warning("Invalid HTTP request received.")
    logger.warning("another line")
    assert len(caplog.records) == 11
    now[0] = 61.0
    few.tell()
    assert caplog.messages[11:] == ["Invalid HTTP request received: 990 more within a minute"]
