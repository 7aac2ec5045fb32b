"""`dcpmla` called in this process, and the line that it prints of a mistake."""

from pathlib import Path

import pytest

from dcpmla.__main__ import main


def generate(model: Path, command: str, *more: object) -> int:
    """Run `generate` on CPUs; return the exit code.

    Args:
        command: Options, separated by spaces.
        more: Options with spaces, and paths.
    """
    return main(["generate", "--model", str(model), "--device", "cpu", *command.split(), *map(str, more)])


def mistake(capfd: pytest.CaptureFixture[str]) -> str:
    """Return the only line that a command has printed to stderr."""
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert line.startswith("dcpmla: error: ")
    return line
