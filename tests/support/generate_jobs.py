"""Jobs of `generate` on two ranks, with a fault in one, without a launcher."""

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.support import faulty, watched_jobs
from tests.support.launchers import restarting, unattended
from tests.support.ranks import start_process
from tests.support.watched_jobs import is_stopped, process_status

TIMEOUT = 5
MARGIN = 30  # seconds: the ranks' start, reads of the posts, the store's grace, and other load on the machine
IDS = [f"prompt {index}" for index in range(6)]
Signal = tuple[int, int]  # number, rank


@dataclass(frozen=True)
class Ended(watched_jobs.Ended):
    """The end of a job, with its outputs and its flight records; its seconds are those since the fault or the start."""

    outputs: bytes
    flights: dict[int, bytes]

    @property
    def ids(self) -> list[str]:
        assert not self.outputs or self.outputs.endswith(b"\n")
        return [json.loads(line)["id"] for line in self.outputs.splitlines()]


class Job:
    """A job's directory: prompts, outputs, and the files of `faulty`."""

    def __init__(self, directory: Path, ids: Sequence[str]) -> None:
        self.directory = directory
        prompts = [
            {"id": request_id, "prompt_token_ids": [5, 6, 7 + index], "max_new_tokens": 2 if index < 2 else 16}
            for index, request_id in enumerate(ids)
        ]
        (directory / "in.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))

    def arguments(self, model: Path, device: str = "cpu", timeout: int = TIMEOUT) -> list[str]:
        files = ["--prompt-file", self.directory / "in.jsonl", "--output-file", self.directory / "out.jsonl"]
        sizes = ["-tp", 2, "-dcp", 2, "--max-num-seqs", 2, "--timeout", timeout]
        sizes += ["--kv-cache-memory-bytes", 4 << 20]  # on a GPU that other tests use
        return [str(argument) for argument in ["generate", "--model", model, "--device", device, *files, *sizes]]

    def pids(self) -> dict[int, int]:
        """Return the newest process of each rank."""
        files = sorted(self.directory.glob("pid *"), key=lambda file: file.stat().st_mtime)
        return {int(rank): int(pid) for rank, pid in (file.name.split()[1:] for file in files)}

    def wait(self, codes: Callable[[], list[int | None]], on_reached: Callable[[], object]) -> Ended:
        """Wait until all processes have an exit code; resume a stopped rank once the other ranks ended."""
        since, reached = time.monotonic(), False
        while None in codes():
            time.sleep(0.1)
            if not reached and (self.directory / "reached").exists():
                since, reached = time.monotonic(), True
                on_reached()
            assert time.monotonic() - since < 100, (self.directory / "errors").read_text()
            for pid in self.pids().values():
                if sum(code is None for code in codes()) == 1 and is_stopped(pid):
                    os.kill(pid, signal.SIGCONT)
        seconds, out = time.monotonic() - since, self.directory / "out.jsonl"
        assert not [pid for pid in self.pids().values() if process_status(pid) not in (None, psutil.STATUS_ZOMBIE)]
        text = (self.directory / "errors").read_text()
        flights = {int(file.name.split()[1]): file.read_bytes() for file in self.directory.glob("flight *")}
        return Ended(
            [int(str(code)) for code in codes()], text, seconds, out.read_bytes() if out.exists() else b"", flights
        )


def direct(
    model: Path,
    fault: dict[str, Any] | None = None,
    send: Signal | None = None,
    more: Sequence[str] = (),
    ids: Sequence[str] = IDS,
    device: str = "cpu",
    timeout: int = TIMEOUT,
) -> Ended:
    """Start two ranks without a launcher; rank 1 gets more arguments."""
    with tempfile.TemporaryDirectory() as directory:
        job = Job(Path(directory), ids)
        environments = [env for _, env in unattended([], 2)]
        return _run(job, environments, job.arguments(model, device, timeout), fault or {}, send, more)


def restarted(model: Path, fault: dict[str, Any]) -> list[Ended]:
    """Start two ranks twice, as torchrun's agent does; the fault comes the first time."""
    with tempfile.TemporaryDirectory() as directory, restarting() as starts:
        job, environments = Job(Path(directory), IDS), [env for _, env in unattended([], 2)]
        return [_run(job, [{**env, **agent} for env in environments], job.arguments(model), fault) for agent in starts]


def _run(
    job: Job,
    environments: list[dict[str, str]],
    arguments: list[str],
    fault: dict[str, Any],
    send: Signal | None = None,
    more: Sequence[str] = (),
) -> Ended:
    processes = [
        start_process(_rank, (job.directory, env, fault, [*arguments, *(more if rank else ())]))
        for rank, env in enumerate(environments)
    ]
    try:
        return job.wait(
            lambda: [process.exitcode for process in processes],
            lambda: send and os.kill(job.pids()[send[1]], send[0]),
        )
    finally:
        for process in processes:
            process.kill()
            process.join()


def _rank(directory: Path, environment: dict[str, str], fault: dict[str, Any], arguments: list[str]) -> None:
    os.environ.update(environment, OMP_NUM_THREADS="1", TORCH_FR_DUMP_TEMP_FILE=str(directory / "flight "))
    os.dup2(os.open(directory / "errors", os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(faulty.run(directory, fault, arguments))


def at(when: str, what: str, rank: int = 1) -> dict[str, Any]:
    return {"rank": rank, "when": when, "what": what}
