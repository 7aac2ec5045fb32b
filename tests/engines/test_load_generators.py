"""The load generators of docs/benchmarks.md: their commands, as they stand there, against the model that chats."""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.engines.trees import VERSIONS, cache, install, once, vllm_tree, vllm_variables
from tests.support.launchers import ROOT, environment
from tests.support.servers import RunningServer, serve

AIPERF = "0.13.0"
MODEL = ROOT / "examples" / "chat" / "model"
_VLLM = "import sys; sys.argv[0] = 'vllm'; from vllm.entrypoints.cli.main import main; main()"


def read_commands() -> dict[str, list[str]]:
    """Return the page's commands of load generators, by program."""
    section = (
        (ROOT / "docs" / "benchmarks.md").read_text().partition("## A load of requests\n")[2].partition("\n## ")[0]
    )
    blocks = re.findall(r"^```\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    commands = (shlex.split(block.replace("\\\n", " ")) for block in blocks)
    return {words[0]: words for words in commands if words[0] != "dcpmla"}


COMMANDS = read_commands()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with serve(
        tmp_path_factory.mktemp("server"), MODEL, 2, "--served-model-name", "pico", "--max-model-len", 2048
    ) as running:
        yield running


def find_program(name: str) -> tuple[list[str], Mapping[str, str]]:
    """Return the first words of a program's command and its variables; skip the test where it cannot be had."""
    if path := shutil.which(name):
        return [path], {}
    if name == "aiperf":
        folder = once(
            cache() / f"aiperf-{AIPERF}-{sys.version_info.minor}", lambda empty: install(empty, f"aiperf=={AIPERF}")
        )
        return [str(folder / "bin" / "python"), "-m", "aiperf"], {}
    if name == "vllm":
        return [sys.executable, "-c", _VLLM], vllm_variables(vllm_tree(VERSIONS[-1]))
    pytest.skip(f"{name} is not installed")


def run_generator(name: str, words: Sequence[str], directory: Path) -> None:
    """Run a load generator in a directory; skip the test where it cannot be had."""
    program, variables = find_program(name)
    env = {**environment(), **variables}
    run = subprocess.run([*program, *words], env=env, cwd=directory, capture_output=True, text=True, timeout=400)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]


def test_the_page_has_four() -> None:
    assert COMMANDS.keys() == {"aiperf", "guidellm", "genai-bench", "vllm"}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_load_generator_measures_the_server(name: str, server: RunningServer, tmp_path: Path) -> None:
    words = [word.replace("examples/chat/model", str(MODEL)) for word in COMMANDS[name][1:]]
    words = [word.replace("http://127.0.0.1:8000", server.url) for word in words]
    whole = 'requests_total{finish_reason="length"}'
    before = server.metric(whole)
    run_generator(name, words, tmp_path)
    assert server.metric(whole) - before >= 16  # genai-bench gives up what else it has begun
    assert server.metric("refused_requests_total{") == 0
