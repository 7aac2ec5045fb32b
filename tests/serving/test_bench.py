"""`dcpmla bench serve --url`: the load goes over HTTP, nothing is lost, and what is lost is named."""

import json
from pathlib import Path

import pytest

from dcpmla.__main__ import main
from tests.serving.conftest import KEY
from tests.support.servers import RunningServer

pytestmark = pytest.mark.usefixtures("one_process_on_cpu")


def bench(server: RunningServer, model: Path, path: Path, **options: object) -> dict[str, object]:
    values = {"model": model, "device": "cpu", "url": server.url, "num_requests": 9, "json": path, **options}
    values = {"input_lens": "16,60", "output_lens": "1,7", "request_rate": 40, **values}
    named = [str(item) for name, value in values.items() for item in (f"--{name.replace('_', '-')}", value)]
    assert main(["bench", "serve", *named]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    return row


def test_nothing_is_lost(
    server: RunningServer,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("DCPMLA_API_KEY", KEY)
    row = bench(server, model, tmp_path / "good.json")
    assert row["num_lost"] == 0
    seconds = row["seconds"]
    assert isinstance(seconds, float)
    assert row["requests_per_second"] == pytest.approx(9 / seconds, rel=0.01)
    assert 0 < row["time_to_first_token_mean"] < row["end_to_end_seconds_p99"]  # type: ignore[operator]
    assert "0 of 9 lost" in capfd.readouterr().out
    monkeypatch.setenv("DCPMLA_API_KEY", "wrong")
    assert bench(server, model, tmp_path / "bad.json")["num_lost"] == 9
    assert "lost: 9 requests: status 401" in capfd.readouterr().out
