"""Jobs that one command starts, with processes of their own for the ranks: signals to any of them, and their end."""

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from tests.support.launchers import environment, run_program
from tests.support.ranks import start_process
from tests.support.waiting import wait_until
from tests.support.watched_jobs import process_status

_LATE = 200  # seconds that a whole job may take: three processes import torch on a busy machine


class OneCommand:
    """A command that runs, with its outputs in files.

    Attributes:
        process: The command's own process.
    """

    def __init__(self, directory: Path, arguments: list[str]) -> None:
        self._out, self._err = directory / "out", directory / "err"
        for path in (self._out, self._err):
            path.touch()
        argv = ["-m", "dcpmla", *arguments]
        self.process: Any = start_process(run_program, (argv, environment(), self._out, self._err))
        self._seen: dict[int, psutil.Process] = {}

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def errors(self) -> list[str]:
        """Return the lines of stderr, without empty ones, the progress bar's and those of the log at the level info."""
        lines = (line for line in self.err.splitlines() if line and not line.startswith("generate: "))
        return [line for line in lines if not re.match(r"\d\S+ \S+ INFO ", line)]

    def wait_for(self, text: str) -> None:
        """Wait until the command has printed a text, or has ended."""
        wait_until(lambda: text in self.out + self.err or not self.process.is_alive(), f"no {text!r}", late=_LATE)
        assert self.process.is_alive(), self.err

    def ranks(self) -> dict[int, psutil.Process]:
        """Return the processes of the ranks that run."""
        found: dict[int, psutil.Process] = {}
        with suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.process.pid).children(recursive=True)
            self._seen |= {child.pid: child for child in children}
            for child in children:
                if child.ppid() == self.process.pid and "RANK" in (variables := child.environ()):
                    found[int(variables["RANK"])] = child
        return found

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the command."""
        self.ranks()
        os.kill(self.process.pid, number)

    def exit_code(self) -> int:
        """Wait for the end of the command and of all processes that it has started, and return its exit code."""
        wait_until(lambda: self.process.exitcode is not None, "the command does not end", late=_LATE)
        wait_until(lambda: not self.left(), "a process is left")
        return int(self.process.exitcode)

    def left(self) -> list[int]:
        """Return the ids of the processes that run on."""
        return [pid for pid in self._seen if process_status(pid) not in (None, psutil.STATUS_ZOMBIE)]


@contextmanager
def one_command(directory: Path, *arguments: object) -> Iterator[OneCommand]:
    """Run a command on CPUs, and end it with all that it has started."""
    directory.mkdir(exist_ok=True)
    job = OneCommand(directory, [*map(str, arguments), "--device", "cpu"])
    try:
        yield job
    finally:
        job.ranks()
        job.process.kill()
        job.process.join()
        for pid in job.left():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def tokens(file: Path) -> list[list[int]]:
    """Return the tokens that `generate --json` wrote."""
    return [output["token_ids"] for output in json.loads(file.read_text())["outputs"]]
