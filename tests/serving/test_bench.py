"""`dcpmla bench serve --url`: the load goes over HTTP, nothing is lost, and what is lost is named."""

import json
import shutil
from pathlib import Path

import pytest

from dcpmla.__main__ import main
from tests.support.servers import KEY, RunningServer

pytestmark = pytest.mark.usefixtures("one_process_on_cpu")


def bench(server: RunningServer, model: Path, path: Path, code: int = 0, **options: object) -> dict[str, object]:
    values = {"model": model, "device": "cpu", "url": server.url, "num_requests": 9, "json": path, **options}
    values = {"input_lens": "16,60", "output_lens": "1,7", "request_rate": 40, **values}
    named = [str(item) for name, value in values.items() for item in (f"--{name.replace('_', '-')}", value)]
    assert main(["bench", "serve", *named]) == code
    (row,) = json.loads(path.read_text())["rows"]
    assert isinstance(row, dict)
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


def test_what_is_lost(
    server: RunningServer,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Requests too long for the server are lost and counted, and the command fails; if all are lost, nothing is
    written.
    """
    monkeypatch.setenv("DCPMLA_API_KEY", KEY)
    longer, config = tmp_path / "longer", json.loads((model / "config.json").read_text())
    shutil.copytree(model, longer)
    length = config["max_position_embeddings"]
    (longer / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2 * length}))
    lost = bench(server, longer, tmp_path / "some.json", code=2, input_lens=f"16,{length}")["num_lost"]
    assert isinstance(lost, int)
    assert 0 < lost < 9
    printed = capfd.readouterr()
    assert f"{lost} of 9 lost" in printed.out
    (line,) = [line for line in printed.err.splitlines() if "error" in line]
    assert f"dcpmla: error: url (--url) is '{server.url}'; the server must answer all requests, but {lost} of 9" in line
    assert f"are lost: {lost} x status 400" in line
    monkeypatch.setenv("DCPMLA_API_KEY", "wrong")
    out = tmp_path / "bad.json"
    options = ["--model", str(model), "--device", "cpu", "--url", server.url, "--num-requests", "3", "--json", str(out)]
    assert main(["bench", "serve", *options, "--input-lens", "16", "--output-lens", "1"]) == 2
    assert "but 3 of 3 are lost: 3 x status 401" in capfd.readouterr().err
    assert not out.exists()
