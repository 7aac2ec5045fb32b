"""The package where torch, triton and numpy alone are installed: all other packages are refused to fresh processes."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dcpmla import extras
from dcpmla.extras import EXTRAS, MissingExtraError, install, needed_by
from tests.support.launchers import ROOT, Ended, environment
from tests.support.sources import CORE, CORE_MODULES, ROOMS, metadata, room

REFUSED = [*(package for packages in EXTRAS.values() for package in packages), "mpi4py", "flashinfer"]
COMMAND = "import sys; from dcpmla.__main__ import main; sys.exit(main(sys.argv[1:]))"

RunAlone = Callable[..., Ended]


@pytest.fixture(scope="module")
def run_alone() -> Iterator[RunAlone]:
    """Run scripts with arguments in children of a process that has imported torch and triton."""
    server = [sys.executable, "-m", "tests.support.alone", *REFUSED]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(server, env=environment(), cwd=ROOT, text=True, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def run(script: str, *arguments: object) -> Ended:
            argv = [script, *map(str, arguments)]
            print(json.dumps(argv), file=process.stdin, flush=True)
            return Ended(argv, *json.loads(process.stdout.readline()))

        yield run
        process.kill()  # The interpreter would take seconds to end.


def test_the_refusal_refuses(run_alone: RunAlone) -> None:
    result = run_alone("import transformers")
    assert "ModuleNotFoundError: import of transformers halted" in result.stderr


def test_the_core_computes_alone(run_alone: RunAlone) -> None:
    """Import all its modules, and compute a prompt and decodes with a dense layer: no module of a ring is imported."""
    result = run_alone(f"""
import importlib, json, sys
for module in {CORE_MODULES}:
    importlib.import_module(module)
from tests.support.dense_layer import check_steps
check_steps()
print(json.dumps(sorted(name for name in sys.modules if name.startswith("dcpmla."))))
""")
    assert not result.returncode, result.stderr
    imported = json.loads(result.stdout)
    assert set(CORE_MODULES) <= set(imported)
    assert not [module for module in imported if ROOMS[room(module)] > CORE]


@pytest.mark.parametrize(
    ("name", "last"), [("layer", "47 to 48"), ("sparse_layer", "47 to 48"), ("compressed_layer", "67 to 68")]
)
def test_the_layers_examples_need_no_extra(run_alone: RunAlone, name: str, last: str) -> None:
    example = ROOT / "examples" / f"{name}.py"
    result = run_alone("import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')", example)
    assert f"tokens {last}: " in result.stdout, result.stderr


@pytest.mark.parametrize(
    "command",
    [
        "generate --model x",
        "serve --model x",
        "plan --model x",
        "bench generate --model x",
        "bench turns",
        "bench layer --geometry tiny --device cpu",
    ],
)
def test_a_command_says_which_extra_it_needs(run_alone: RunAlone, command: str) -> None:
    result = run_alone(COMMAND, *command.split())
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    (line,) = filter(None, result.stderr.splitlines())
    assert line.startswith("dcpmla: error: ")
    assert f"needs the extra engine: {install('engine')} (import of " in line


def test_doctor_lists_what_is_missing(run_alone: RunAlone) -> None:
    result = run_alone(COMMAND, "doctor", "--device", "cpu")
    assert not result.returncode, result.stderr
    for extra in ("engine", "serve"):
        line = f"not installed: {', '.join(EXTRAS[extra])}; with the extra {extra}: {install(extra)}"
        assert line in result.stdout.splitlines()


def test_a_benchmark_of_kernels_runs(run_alone: RunAlone, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = run_alone(COMMAND, "bench", "decode", "--device", "cpu", "--time-limit", "1", "--json", out)
    assert not result.returncode, result.stderr
    assert json.loads(out.read_text())["rows"]


def test_names_of_the_engine_name_the_extra(run_alone: RunAlone) -> None:
    result = run_alone("""
import dcpmla
from dcpmla import Engine, SamplingParams
assert not hasattr(dcpmla, "LMM")
try:
    from dcpmla import LLM
except ImportError as error:
    print(error)
""")
    assert result.stdout == (
        f"dcpmla.LLM needs the extra engine: {install('engine')} (import of tqdm halted; None in sys.modules)\n"
    ), result.stderr


def test_other_imports_that_fail_keep_their_error() -> None:
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_package'"), needed_by("this"):
        import no_such_package  # noqa: F401
    line = f"this needs the extra plot: {install('plot')} (cannot import name 'x' from 'matplotlib.y')"
    with pytest.raises(MissingExtraError, match=f"^{re.escape(line)}$"), needed_by("dcpmla"), needed_by("this"):
        raise ImportError("cannot import name 'x' from 'matplotlib.y'", name="matplotlib.y")


def test_the_command_installs_an_extra_of_this_checkout(tmp_path: Path) -> None:
    """pip takes it in another folder, with no index to ask."""
    command, *arguments = shlex.split(install("plot"))
    offline = ["--dry-run", "--no-index", "--no-deps", "--no-build-isolation"]
    run = [sys.executable, "-m", command, *arguments[:1], *offline, *arguments[1:]]
    result = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "Would install dcpmla-" in result.stdout


def test_the_command_of_an_installed_package_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "dcpmla" / "extras.py"))
    assert install("plot") == "pip install 'dcpmla[plot]'"


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_declares_its_packages(extra: str) -> None:
    names = {"pynvml": "nvidia-ml-py", "zmq": "pyzmq"}
    declared = metadata()["optional-dependencies"]
    assert {names.get(package, package.replace("_", "-")) for package in EXTRAS[extra]} == {
        name.partition(">")[0] for name in declared[extra] if not name.startswith("dcpmla")
    }
