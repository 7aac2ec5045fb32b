"""Run tests with named versions of packages in a fresh environment; passing versions go to tested_versions.txt.

    python launch/check_versions.py torch==2.13.0 transformers==5.17.0 --tests tests/integrations/test_transformers.py

Other packages have the versions of constraints.txt. Each environment is a temporary directory.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "launch" / "tested_versions.txt"
_REPORT = """
import importlib.metadata, platform, sys, torch
names = [f"{name} {importlib.metadata.version(name)}" for name in sys.argv[1:]]
print(", ".join([*names, f"python {platform.python_version()}", "GPUs" if torch.cuda.is_available() else "CPUs"]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+", type=requirement, metavar="NAME==VERSION")
    parser.add_argument("--tests", nargs="+", default=["tests"], metavar="PATH", help="default: all")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        python = install(Path(directory), args.versions)
        command = [python, "-m", "pytest", "--ignore", "tests/engines", *args.tests]
        done = subprocess.run(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True)
        print(done.stdout)
        if done.returncode:
            sys.exit("a test failed: nothing is recorded")
        names = dict.fromkeys(["torch", "transformers", *(text.partition("==")[0] for text in args.versions)])
        versions = run(python, "-c", _REPORT, *names).strip()
    record(RECORD, versions, args.tests, done.stdout, datetime.now(UTC))


def requirement(text: str) -> str:
    """Read a package with its version."""
    if not re.fullmatch(r"[\w-]+==[\w.+]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME==VERSION, as in torch==2.13.0")
    return text


def install(directory: Path, versions: list[str]) -> Path:
    """Make an environment with these versions and the package in it; return its Python."""
    constraints = directory / "constraints.txt"
    constraints.write_text(constrain((ROOT / "launch" / "constraints.txt").read_text(), versions))
    run(sys.executable, "-m", "venv", directory / "venv")
    python = directory / "venv" / "bin" / "python"
    torch = next((text for text in versions if text.startswith("torch==")), "torch==2.13.0")
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, torch)
    run(*pip, "--constraint", constraints, "--editable", f"{ROOT}[dev]", *versions)
    return python


def constrain(constraints: str, versions: list[str]) -> str:
    """Return the constraints without packages whose versions are named."""
    named = {text.partition("==")[0] for text in versions}
    return "".join(line for line in constraints.splitlines(keepends=True) if line.partition("==")[0] not in named)


def record(file: Path, versions: str, tests: list[str], output: str, now: datetime) -> None:
    """Write a line for the versions, in place of an earlier line for the same versions and tests."""
    (counts,) = re.findall(r"(\d+ passed[^\n]*?) in [\d.]+s", output)[-1:] or ["passed"]
    start = f"{versions}; {' '.join(tests)}: "
    lines = file.read_text().splitlines() if file.exists() else []
    lines = [line for line in lines if start not in line]
    file.write_text("\n".join([*lines, f"{now:%Y-%m-%d}  {start}{counts}"]) + "\n")


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def run(*command: object) -> str:
    done = subprocess.run(list(map(str, command)), check=True, env=environment(), stdout=subprocess.PIPE, text=True)
    return done.stdout


if __name__ == "__main__":
    main()
