"""Agents as programs, with the settings of docs/agents.md, against a scripted model: those that are installed.

Each is asked to make a file. The model calls the agent's tool for commands, then answers; no request is refused. The
programs come from npm: @anthropic-ai/claude-code, @openai/codex, opencode-ai and cline.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from tests.support.agent import TEMPLATE, call
from tests.support.fake_ranks import RunningScript
from tests.support.launchers import ROOT
from tests.support.servers import AUTHORIZED, KEY
from tests.support.small_tokenizers import scripted_tokenizer

PAGE = (ROOT / "docs" / "agents.md").read_text()
COMMAND = "echo made > made.txt"
# Arguments of the tools for commands, by the tools' names.
CALLS: dict[str, dict[str, Any]] = {
    "Bash": {"command": COMMAND, "description": "x"},
    "exec_command": {"cmd": COMMAND},
    "bash": {"command": COMMAND, "description": "x"},
    "run_commands": {"commands": [COMMAND]},
}
SECONDS = 300  # after which a program that hangs is killed


def script(prompt: str) -> str:
    """Call the tool for commands that the prompt has, then answer."""
    reasoning = "so</think>" if prompt.endswith("<think>") else ""
    if "<|tool|>" in prompt:
        return f"{reasoning}It is made."
    found = [call(name, **arguments) for name, arguments in CALLS.items() if f'"name": "{name}"' in prompt]
    return reasoning + (f"I make it. {found[0]}" if found else "A file")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningScript]:
    tokenizer = scripted_tokenizer(TEMPLATE)
    running = RunningScript(tokenizer, script, tmp_path_factory.mktemp("script"), name="local")
    running.step = 16
    yield running
    running.close()


@dataclass
class Machine:
    """A user's folder and a project for an agent, and the settings of the page with the server's address and key."""

    home: Path
    project: Path
    url: str

    def block(self, heading: str, language: str) -> str:
        """Return the first block of a language under a heading of the page."""
        section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
        (text, *_) = re.findall(rf"^```{language}\n(.*?)^```$", section, flags=re.DOTALL | re.MULTILINE)
        return re.sub(r"\bKEY\b", KEY, text.replace("http://127.0.0.1:8000", self.url))

    def write(self, path: str, text: str) -> None:
        file = self.home / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a program in the project, with a user's variables alone; it reaches no other machine."""
        own = {"HOME": str(self.home), "PATH": os.environ["PATH"], "TERM": "dumb", "LANG": "C.UTF-8"}
        elsewhere = {"HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"}
        env = {**own, **elsewhere, "DCPMLA_API_KEY": KEY}
        return subprocess.run(
            command,
            cwd=self.project,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )


def claude(machine: Machine) -> list[str]:
    machine.write(".claude/settings.json", machine.block("Claude Code", "json"))
    return ["-p", "Make made.txt.", "--allowedTools", "Bash", "--output-format", "stream-json", "--verbose"]


def codex(machine: Machine) -> list[str]:
    machine.write(".codex/config.toml", machine.block("Codex", "toml"))
    machine.write(".codex/local.json", machine.block("Codex", "json"))
    return ["exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "Make made.txt."]


def opencode(machine: Machine) -> list[str]:
    machine.write(".config/opencode/opencode.json", machine.block("opencode", "json"))
    return ["run", "--format", "json", "Make made.txt."]


def cline(machine: Machine) -> list[str]:
    auth = machine.block("Cline", "").split()
    assert machine.run(*auth).returncode == 0
    return ["--json", "Make made.txt."]


@pytest.fixture
def machine(server: RunningScript, tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path / "home", tmp_path / "project", server.url)
    made.home.mkdir()
    made.project.mkdir()
    yield made
    for process in psutil.process_iter(["cmdline", "environ"]):  # Cline's service lives on.
        if (process.info["environ"] or {}).get("HOME") == str(made.home):
            process.kill()


def num_refused(server: RunningScript) -> float:
    lines = httpx2.get(f"{server.url}/metrics", headers=AUTHORIZED).text.splitlines()
    refused = [
        line for line in lines if line.startswith("dcpmla_refused_requests_total") and 'status="401"' not in line
    ]
    return sum(float(line.split()[-1]) for line in refused)


@pytest.mark.parametrize("arguments", [claude, codex, opencode, cline], ids=lambda each: each.__name__)
def test_an_agent_makes_a_file(
    server: RunningScript, machine: Machine, arguments: Callable[[Machine], list[str]]
) -> None:
    program = arguments.__name__
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    before, num_before = num_refused(server), len(server.submitted)
    ran = machine.run(program, *arguments(machine))
    assert ran.returncode == 0, (ran.stdout[-2000:], ran.stderr[-2000:])
    assert (machine.project / "made.txt").read_text() == "made\n", (ran.stdout[-2000:], ran.stderr[-2000:])
    assert "It is made." in ran.stdout
    assert len(server.submitted) >= num_before + 2
    assert num_refused(server) == before
