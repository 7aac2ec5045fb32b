"""How a server ends: told to stop, with a dead rank, and started again by torchrun."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from tests.support.launchers import ROOT, environment, free_port
from tests.support.servers import NEEDLE, QUESTION, read_events, serve, wait_until_healthy
from tests.support.waiting import wait_until

LONG = {"prompt": QUESTION, "temperature": 0, "ignore_eos": True, "stream": True}


class Reader(threading.Thread):
    """A client that reads a stream to its end."""

    def __init__(self, url: str, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self._url, self._body = url, {**LONG, "max_tokens": max_tokens}
        self.status, self.lines, self.begun = 0, list[str](), threading.Event()

    def run(self) -> None:
        with httpx2.stream("POST", f"{self._url}/v1/completions", json=self._body, timeout=60) as response:
            self.status = response.status_code
            for line in response.iter_lines():
                self.lines.append(line)
                self.begun.set()

    @classmethod
    @contextmanager
    def reading(cls, url: str, max_tokens: int) -> Iterator["Reader"]:
        """Run a block once the first token has come, and wait for the last one."""
        reader = cls(url, max_tokens)
        reader.start()
        assert reader.begun.wait(30)
        yield reader
        reader.join(60)
        assert not reader.is_alive()


def refused(url: str) -> tuple[int, str]:
    response = httpx2.post(f"{url}/v1/completions", json={**LONG, "stream": False, "max_tokens": 1}, timeout=30)
    return response.status_code, response.json()["error"]["code"]


def test_told_to_stop_while_answering(tmp_path: Path) -> None:
    """By a signal to any rank; before that the queue is full."""
    options = ["--max-num-seqs", 1, "--max-waiting", 1, "--drain-seconds", 30]
    with serve(tmp_path, NEEDLE, 2, *options) as server:
        with Reader.reading(server.url, 120) as running:
            waiting = Reader(server.url, 3)
            waiting.start()
            wait_until(lambda: server.metric("requests_waiting") == 1, "the request does not wait", 0.02)
            answer = httpx2.post(f"{server.url}/v1/completions", json={"prompt": QUESTION}, timeout=30)
            assert (answer.status_code, answer.headers["Retry-After"]) == (429, "1")
            server.stop(rank=1)
            wait_until(lambda: httpx2.get(f"{server.url}/health").status_code != 200, "it does not stop", 0.02)
            assert running.is_alive()
            assert refused(server.url) == (503, "stopping")
        waiting.join(30)
        for reader, num_tokens in ((running, 120), (waiting, 3)):
            chunks = read_events(reader.lines)
            assert chunks[-1]["choices"][0]["finish_reason"] == "length"
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == " ".join(["123"] * num_tokens)
        assert server.exit_codes() == [0, 0], server.log()


def test_time_is_over_and_the_port_is_taken(tmp_path: Path) -> None:
    with serve(tmp_path, NEEDLE, 1, "--drain-seconds", 1) as server:
        with Reader.reading(server.url, 8000) as running:
            server.stop()
        error = json.loads(running.lines[-2].removeprefix("data: "))["error"]
        assert (error["type"], error["code"]) == ("server_error", "stopping")
        assert server.exit_codes() == [0], server.log()
        assert "leaked" not in server.log()


def page(*changes: tuple[str, str]) -> list[str]:
    """Return the blocks of docs/serving.md, with some words changed."""
    text = (ROOT / "docs" / "serving.md").read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return re.findall(r"^```\w*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Any]:
    """Run the page's first command, with what makes it small; yield the process, its address and the page's blocks."""
    port = free_port()
    small = f"--device cpu --port {port} --kv-cache-memory-bytes {4 << 20}"
    start, *others = page((":8000", f":{port}"), ("--max-restarts", "--monitor-interval 0.2 --max-restarts"))
    name, *words = shlex.split(f"{start} {small}")
    assert name == "torchrun"
    with (tmp_path / "output").open("wb") as output:
        argv = [sys.executable, "-m", "torch.distributed.run", *words]
        agent = psutil.Popen(argv, env=environment(), cwd=ROOT, stdout=output, stderr=output)
    yield agent, f"http://127.0.0.1:{port}", others
    for process in [*agent.children(recursive=True), agent]:
        process.kill()
    agent.wait()
    assert "2 ranks, 2 of them on this host, started by torchrun, on CPUs" in (tmp_path / "output").read_text()


def test_a_dead_rank_fails_all_requests_and_torchrun_starts_it_again(
    job: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the page's commands work."""
    agent, url, (ask, use, *_) = job
    wait_until_healthy(url, 90, agent.is_running)
    # The first rank has children that serve HTTP.
    (rank_1,) = (rank for rank in agent.children() if not rank.children())
    with Reader.reading(url, 8000) as running:
        rank_1.kill()
        killed = time.monotonic()
    last = json.loads(running.lines[-2].removeprefix("data: "))
    assert "error" in last, running.lines[-4:]
    assert (last["error"]["type"], last["error"]["code"]) == ("server_error", "rank_failed")
    wait_until_healthy(url, 90, agent.is_running)
    print(f"healthy {time.monotonic() - killed:.1f} s after the rank's death")
    if shutil.which("curl"):
        answer = subprocess.run(shlex.split(ask), capture_output=True, check=True, timeout=60).stdout
        assert json.loads(answer)["choices"][0]["text"] == "123"
    exec(use, {})
    assert capsys.readouterr().out.splitlines()[-1].startswith("456 ")
