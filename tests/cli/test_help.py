"""What a command imports: --help no more than the package itself, a benchmark no other benchmark."""

import json
import subprocess
import sys

import pytest

from dcpmla.cli.bench import BENCHMARKS
from tests.support.launchers import ROOT, environment

HEAVY = {"transformers", "tokenizers", "matplotlib"}
SCRIPT = """
import contextlib, io, json, sys
import dcpmla
package = set(sys.modules)
from dcpmla.__main__ import main
said = io.StringIO()
try:
    with contextlib.redirect_stdout(said):
        main(sys.argv[1:])
except SystemExit as end:
    assert end.code == 0
assert said.getvalue().startswith("usage: dcpmla ")
print(json.dumps([sorted(set(sys.modules) - package), sorted(sys.modules)]))
"""


def imports_of_help(*command: str) -> tuple[list[str], list[str]]:
    """Return the modules that `COMMAND --help` imports beyond the package's own, and all modules of its process."""
    argv = [sys.executable, "-c", SCRIPT, *command, "--help"]
    result = subprocess.run(argv, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    more, everything = json.loads(result.stdout)
    return more, everything


def test_help_imports_no_command() -> None:
    more, everything = imports_of_help()
    ours = {name for name in more if name.startswith("dcpmla.")}
    assert {name.split(".")[1] for name in ours} <= {"__main__", "extras", "job"}
    assert not HEAVY & set(everything)


@pytest.mark.parametrize("name", ["decode", "layer"])
def test_a_benchmark_imports_no_other(name: str) -> None:
    more, everything = imports_of_help("bench", name)
    measured = {module.rpartition(".")[2] for module in more if module.startswith("dcpmla.bench.")} & set(BENCHMARKS)
    assert measured == {name}
    assert not HEAVY & set(everything)
    assert not {"dcpmla.cli.generate", "dcpmla.cli.plan", "dcpmla.llm"} & set(everything)


def test_help_of_doctor_is_light() -> None:
    assert not HEAVY & set(imports_of_help("doctor")[1])
