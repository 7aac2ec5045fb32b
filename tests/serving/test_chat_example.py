"""The example that chats: the demo's talk, README's commands and other talks, over HTTP, by real clients."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.support.launchers import ROOT, environment

EXAMPLE = ROOT / "examples" / "chat"
sys.path.insert(0, str(EXAMPLE))
import talk  # noqa: E402

SECTION = (ROOT / "README.md").read_text().partition("## Talk to it\n")[2].partition("\n## ")[0]
BLOCKS = re.findall(r"^```\w*\n(.*?)^```", SECTION, re.DOTALL | re.MULTILINE)
SERVE, CURL, SCRIPT = BLOCKS


@pytest.fixture(scope="module")
def url(monkeypatch_module: pytest.MonkeyPatch) -> Iterator[str]:
    """Run README's command, on a port that is free and with a small cache."""
    program, *words = shlex.split(SERVE)
    assert program == "dcpmla"
    argv = [sys.executable, "-m", "dcpmla", *words]
    with talk.serving([*argv, "--port", "0", "--device", "cpu", "--kv-cache-memory-bytes", str(16 << 20)]) as address:
        yield address


@pytest.fixture(scope="module")
def monkeypatch_module() -> Iterator[pytest.MonkeyPatch]:
    """Run commands from the repository's root, with its package and without what a launcher has set."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        for name, value in environment().items():
            patch.setenv(name, value)
        yield patch


@pytest.fixture(scope="module")
def client(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


def ask(client: OpenAI, *contents: str, **fields: Any) -> Any:
    messages = [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(contents)]
    return client.chat.completions.create(model="pico", messages=messages, temperature=0, **fields)


def test_the_demo_s_talk(url: str) -> None:
    assert talk.converse(url) == talk.EXPECTED


def test_the_page_s_curl(url: str) -> None:
    command = CURL.replace("http://127.0.0.1:8000", url)
    run = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    (answer,) = re.findall(r"The answer is `(.*?)`", SECTION)
    assert json.loads(run.stdout)["choices"][0]["message"]["content"] == answer


def test_the_page_s_script(url: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("http://127.0.0.1:8000", url))
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    shown = re.findall(r"(?:print\(.*\)  |^)# (.*)", SCRIPT, re.MULTILINE)
    assert len(shown) == 3
    assert run.stdout.splitlines() == shown


def test_a_streamed_call(client: OpenAI) -> None:
    chunks = list(ask(client, "What is the weather in Tokyo?", tools=[talk.WEATHER], stream=True))
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert [call.function.name for call in calls if call.function.name] == ["get_weather"]
    assert json.loads("".join(call.function.arguments or "" for call in calls)) == {"city": "Tokyo"}
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_calls_that_must_and_must_not_come(client: OpenAI) -> None:
    """A grammar in the model's markup does not lead it astray."""
    question = "What is the weather in Tokyo?"
    (call,) = ask(client, question, tools=[talk.WEATHER], tool_choice="required").choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Tokyo"}
    assert ask(client, "Hello!", tools=[talk.WEATHER]).choices[0].message.content == "Hello! How can I help?"
    assert not ask(client, question, tools=[talk.WEATHER], tool_choice="none").choices[0].message.tool_calls
