"""What a command imports: --help no more than the package itself, a benchmark no other benchmark."""

import json
import subprocess
import sys

import pytest

from dcpmla.cli.bench import BENCHMARKS
from tests.support.launchers import ROOT, environment

HEAVY = {"transformers", "tokenizers", "matplotlib"}
COMMANDS = ["", "bench decode", "bench layer", "doctor"]
# Imports the package once, and asks each command for help in a process forked from there.
SCRIPT = """
import contextlib, io, json, os, sys
import dcpmla
package = set(sys.modules)
for command in sys.argv[1:]:
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        continue
    from dcpmla.__main__ import main
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            main([*command.split(), "--help"])
    except SystemExit as end:
        assert end.code == 0
    assert said.getvalue().startswith("usage: dcpmla ")
    print(json.dumps([command, sorted(set(sys.modules) - package), sorted(sys.modules)]))
    sys.exit()
"""
Imports = dict[str, tuple[set[str], set[str]]]


@pytest.fixture(scope="module")
def imports() -> Imports:
    """Return by command the modules that its --help imports beyond the package's own, and all of its process."""
    argv = [sys.executable, "-c", SCRIPT, *COMMANDS]
    result = subprocess.run(argv, env=environment(), cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=120)
    assert result.returncode == 0
    lines = map(json.loads, result.stdout.splitlines())
    return {command: (set(more), set(everything)) for command, more, everything in lines}


def test_help_imports_no_command(imports: Imports) -> None:
    ours = {name for name in imports[""][0] if name.startswith("dcpmla.")}
    assert {name.split(".")[1] for name in ours} <= {"__main__", "extras", "job", "own_files"}
    assert not [command for command, (_, everything) in imports.items() if HEAVY & everything]


@pytest.mark.parametrize("name", ["decode", "layer"])
def test_a_benchmark_imports_no_other(imports: Imports, name: str) -> None:
    more, everything = imports[f"bench {name}"]
    measured = {module.rpartition(".")[2] for module in more if module.startswith("dcpmla.bench.")} & set(BENCHMARKS)
    assert measured == {name}
    assert not {"dcpmla.cli.generate", "dcpmla.cli.plan", "dcpmla.llm"} & everything
