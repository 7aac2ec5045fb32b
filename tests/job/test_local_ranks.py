"""The process that starts a host's ranks: their variables, outputs, signals, ends. The ranks are small programs."""

import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from dcpmla.job import local_ranks
from dcpmla.job.hosts import Hosts
from dcpmla.job.launcher import is_started
from dcpmla.job.local_ranks import end_with_parent, run_local_ranks
from tests.job.test_launcher import env_of
from tests.support import small_rank
from tests.support.ranks import start_process
from tests.support.waiting import wait_until
from tests.support.watched_jobs import is_stopped, process_status

SOON = ((0.0, signal.SIGTERM), (0.3, signal.SIGTERM), (0.6, signal.SIGKILL))


@dataclass
class Family:
    """A parent of ranks, and what they write."""

    directory: Path
    process: Any
    num_ranks: int

    def ranks(self) -> list[dict[str, Any]]:
        """Return the variables and process ids of all ranks, once they are there."""
        paths = [self.directory / f"rank {rank}" for rank in range(self.num_ranks)]
        wait_until(lambda: all(path.exists() for path in paths), "the ranks did not start")
        return [json.loads(path.read_text()) for path in paths]

    def code(self) -> int:
        """Wait for the end, which leaves no process, and return the exit code."""
        ranks = self.ranks()
        wait_until(lambda: self.process.exitcode is not None, "the parent did not end")
        pids = [pid for rank in ranks for pid in (rank["pid"], rank["child"]) if pid]
        assert not [pid for pid in pids if process_status(pid) not in (None, psutil.STATUS_ZOMBIE)]
        return int(self.process.exitcode)

    def read(self, name: str) -> str:
        return (self.directory / name).read_text()

    def errors(self) -> list[str]:
        """Return the lines of stderr that the ranks' programs did not write."""
        lines = self.read("err").splitlines()
        return [line for line in lines if line and "is one" not in line and "warning of" not in line]


@contextmanager
def family(directory: Path, *actions: str, parent: Callable[..., object] | None = None) -> Iterator[Family]:
    process = start_process(parent or _parent, (directory, actions))
    found = Family(directory, process, len(actions))
    try:
        yield found
    finally:
        process.kill()
        process.join()
        for path in directory.glob("rank *"):
            pid = json.loads(path.read_text())["pid"]
            if process_status(pid) not in (None, psutil.STATUS_ZOMBIE):
                os.kill(pid, signal.SIGKILL)


def _parent(directory: Path, actions: tuple[str, ...], stops: tuple[tuple[float, int], ...] = SOON) -> None:
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    local_ranks._STOPS, local_ranks._PAUSE = stops, 0.3  # type: ignore[misc]
    sys.orig_argv = [sys.executable, str(small_rank.__file__), str(directory), *actions]
    os.environ.pop("OMP_NUM_THREADS", None)
    sys.exit(run_local_ranks(len(actions), Hosts()))


def test_ranks_are_numbered_and_the_first_is_heard(tmp_path: Path) -> None:
    with family(tmp_path, "exit 0", "exit 0", "exit 0") as job:
        ranks = job.ranks()
        assert job.code() == 0
    for number, rank in enumerate(ranks):
        own = {"RANK": str(number), "LOCAL_RANK": str(number), "DCPMLA_PARENT": str(job.process.pid)}
        shared = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        assert (own | shared).items() <= rank.items()
    assert job.read("out") == "rank 0 says so\n"
    lines = sorted(line for line in job.read("err").splitlines() if line)
    assert lines == [
        *(f"dcpmla: error: rank {rank} is one" for rank in range(3)),
        "rank 1: warning of 1",
        "rank 2: warning of 2",
        "warning of 0",
    ]


ENDS: dict[str, tuple[tuple[str, ...], int, list[str]]] = {  # -> what ranks do, exit code, beginnings of lines
    "a fault": (("sleep", "exit 3", "sleep"), 3, []),
    "of the first": (("exit 1", "sleep"), 1, []),
    "killed": (("drain 2", "kill 9"), 137, ["rank 1 was killed by SIGKILL: see the lines above and dmesg"]),
    "crashed": (("kill 11", "drain 1"), 139, ["rank 0 was killed by SIGSEGV: "]),
    "deaf": (("ignore", "exit 2"), 2, ["rank 0 or its children did not end within 1 s and were killed"]),
    "a child is left": (("leave", "exit 0"), 0, ["rank 0 or its children did not end within 1 s and were killed"]),
}


@pytest.mark.parametrize("name", ENDS)
def test_one_ends_all(name: str, tmp_path: Path) -> None:
    actions, code, lines = ENDS[name]
    with family(tmp_path, *actions) as job:
        assert job.code() == code
        assert len(job.errors()) == len(lines), job.read("err")
        for line, words in zip(job.errors(), lines, strict=True):
            assert line.startswith(f"dcpmla: error: {words}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_every_rank_once(number: signal.Signals, tmp_path: Path) -> None:
    """As those of a server that finishes its requests do, and then ends in order."""
    unhurried = partial(_parent, stops=((0.0, signal.SIGTERM), (300.0, signal.SIGKILL)))  # ranks may take long to end
    with family(tmp_path, "drain 1", "drain 2", parent=unhurried) as job:
        job.ranks()
        wait_until(lambda: all((tmp_path / f"got {rank}").exists() for rank in range(2)), "a rank has no handler")
        os.kill(job.process.pid, number)
        wait_until(lambda: all(job.read(f"got {rank}") == number.name for rank in range(2)), "no signal came")
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.code() == 0
        assert job.read("got 1") == f"{number.name} SIGTERM"
        assert job.errors() == []


def test_ctrl_z_pauses_all(tmp_path: Path) -> None:
    """Also a rank that ignores it. All go on together, as often as they are asked to."""
    with family(tmp_path, "sleep", "ignore") as job:
        pids = [job.process.pid, *(rank["pid"] for rank in job.ranks())]
        for _ in range(2):
            os.kill(job.process.pid, signal.SIGTSTP)
            wait_until(lambda: all(map(is_stopped, pids)), "a process goes on")
            os.kill(job.process.pid, signal.SIGCONT)
            wait_until(lambda: not any(map(is_stopped, pids)), "a process stays stopped")
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.code() == 128 + signal.SIGTERM


def test_stopped_at_its_start(tmp_path: Path) -> None:
    """Ranks without a handler yet end silently, and the parent has one line for them all."""
    with family(tmp_path, "sleep", "sleep") as job:
        job.ranks()
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.code() == 128 + signal.SIGTERM
        (line,) = job.errors()
        assert line.endswith("was asked to stop (SIGTERM): run the same command again")


class LateSignal:
    """A SIGTERM that comes when the ranks have ended, and their parent does not know yet."""

    def read(self) -> list[int]:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        return [signal.SIGTERM]


def test_a_failure_is_known_though_a_signal_came_after_it(tmp_path: Path) -> None:
    with family(tmp_path, "exit 3", parent=_late_parent) as job:
        assert job.code() == 3


def _late_parent(directory: Path, actions: tuple[str, ...]) -> None:
    sys.orig_argv = [sys.executable, str(small_rank.__file__), str(directory), *actions]
    sys.exit(local_ranks._LocalRanks(list(Hosts().variables(1, 1)), LateSignal()).wait())  # type: ignore[arg-type]


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConnectionError, match=f"cannot listen at port {port}.*Address already in use; set master"):
            run_local_ranks(2, Hosts(master_port=port))


def test_a_rank_without_its_parent() -> None:
    with pytest.raises(ConnectionError, match="process 1234567 .DCPMLA_PARENT., which started this rank, is gone"):
        start_in_child(lambda: end_with_parent({"DCPMLA_PARENT": "1234567"}))


def start_in_child(function: Callable[[], object]) -> None:
    """Call a function that changes a process's signals in another process; raise its ConnectionError."""
    reader, writer = os.pipe()
    if child := os.fork():
        os.close(writer)
        with os.fdopen(reader) as answer:
            text = answer.read()
        os.waitpid(child, 0)
        raise ConnectionError(text) if text else AssertionError("no error")
    try:
        function()
    except ConnectionError as error:
        os.write(writer, str(error).encode())
    finally:
        os._exit(0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nnodes": 0}, "nnodes (--nnodes) is 0; it must be a whole number of at least 1"),
        ({"node_rank": 1}, "node_rank (--node-rank) is 1; it must be below nnodes (--nnodes) 1"),
        ({"nnodes": 2, "node_rank": 2, "master_addr": "a"}, "node_rank (--node-rank) is 2; it must be below nnodes"),
        ({"nnodes": 2}, "master_addr (--master-addr) is missing, but nnodes (--nnodes) is 2; give the name or address"),
        ({"master_port": 0}, "master_port (--master-port) is 0; it must be a port in [1, 65535], or none"),
    ],
)
def test_mistakes_of_hosts(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the words are compared below)
        Hosts(**options)
    assert words in str(caught.value)


def test_numbers_of_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Hosts(nnodes=3, node_rank=1, master_addr="n0")
    assert hosts.address == ("n0", 29500)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    ranks = list(hosts.variables(6, 29500))
    assert [(rank["RANK"], rank["LOCAL_RANK"], rank["OMP_NUM_THREADS"]) for rank in ranks] == [
        ("2", "0", "4"),
        ("3", "1", "4"),
    ]
    with pytest.raises(ValueError, match=r"tensor_parallel_size \(-tp\) is 8; it must be a multiple of nnodes"):
        hosts.check_ranks(8)


@pytest.mark.parametrize(
    ("words", "nnodes", "expected"),
    [
        ("", 1, False),
        ("torchrun", 1, True),
        ("OMPI_COMM_WORLD_RANK=0", 1, True),
        ("srun", 1, True),
        ("srun", 7, False),  # a task on each host
        ("srun SLURM_NTASKS=1", 1, False),  # a shell of `srun --pty`
        ("srun -SLURM_STEP_ID", 1, False),  # a batch script
    ],
)
def test_ranks_that_a_launcher_has_started(words: str, nnodes: int, expected: bool) -> None:
    assert is_started(env_of(words), nnodes) is expected
