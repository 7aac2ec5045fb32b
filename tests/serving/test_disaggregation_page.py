"""docs/disaggregation.md: its commands run as they are, but on CPUs and on free ports."""

import json
import re
import shlex
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.launchers import ROOT
from tests.support.servers import NEEDLE, RunningServer, serve

PAGE = (ROOT / "docs" / "disaggregation.md").read_text()
LINES = [
    line for block in re.findall(r"^```\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE) for line in block.splitlines()
]


def command(start: str) -> list[list[str]]:
    """Return the words of the page's commands that begin so."""
    return [shlex.split(line)[len(start.split()) :] for line in LINES if line.startswith(start)]


def test_the_page_has_commands() -> None:
    (export,) = command("export")
    assert export[0].startswith("DCPMLA_API_KEY=")
    assert len(command("torchrun --standalone --nproc-per-node")) == 2
    assert len(command("curl")) == 1


def ask(server: RunningServer, body: dict[str, Any], key: str) -> str:
    answer = httpx2.post(
        f"{server.url}/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=60
    )
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def test_the_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decode server answers the page's question, and a longer one whose blocks come from the prefill server."""
    ((export,),) = command("export")
    name, _, key = export.partition("=")
    monkeypatch.setenv(name, key)
    prefill, decode = (
        (int(num_ranks), [*options])
        for num_ranks, _, _, _, *options in command("torchrun --standalone --nproc-per-node")
    )
    ((url, _, _, _, content),) = command("curl")
    assert url == f"http://127.0.0.1:{option(decode[1], '--port')}/v1/completions"
    body = json.loads(content)
    assert option(decode[1], "--prefill-servers") == f"http://127.0.0.1:{option(prefill[1], '--port')}"
    for _, options in (prefill, decode):
        assert ROOT / option(options, "--model") == NEEDLE
    with serve(tmp_path, NEEDLE, prefill[0], *without(prefill[1], "--port", "--model")) as first:
        options = [*without(decode[1], "--port", "--model", "--prefill-servers"), "--prefill-servers", first.url]
        with serve(tmp_path, NEEDLE, decode[0], *options) as second:
            assert ask(second, body, key).startswith("123")
            facts, _, question = body["prompt"].rpartition("; ")
            long = {**body, "prompt": f"{facts}; " * 40 + question}
            authorization = {"Authorization": f"Bearer {key}"}
            until = time.monotonic() + 30  # by then it is connected
            while not second.metric("kv_transfer_bytes_total", **authorization):
                assert time.monotonic() < until
                long["prompt"] = "amber-ash 100; " + long["prompt"]  # nothing of it is cached
                assert ask(second, long, key).startswith("123")


def option(words: list[str], name: str) -> str:
    """Return the value of an option."""
    return words[words.index(name) + 1]


def without(words: list[str], *names: str) -> list[str]:
    """Return the words without some options and their values."""
    dropped = {index + offset for index, word in enumerate(words) if word in names for offset in (0, 1)}
    return [word for index, word in enumerate(words) if index not in dropped]
