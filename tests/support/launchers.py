"""Starting a program's ranks as torchrun, mpirun and Slurm do, also from several launchers at once (one a host)."""

import importlib.util
import json
import os
import runpy
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.support.ranks import start_process
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
MEET = [str(ROOT / "tests" / "support" / "meet.py"), "60"]
GENERATE = ["-m", "dcpmla", "generate"]
_PREFIXES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "GROUP_",
    "MASTER_",
    "SLURM_",
    "OMPI_",
    "PMI",
    "MPI_",
    "TORCH_",
    "TORCHELASTIC_",
)

Command = tuple[Sequence[object], Mapping[str, str]]  # argv, variables on top of `environment()`
Ended = subprocess.CompletedProcess[str]


def environment() -> dict[str, str]:
    """Return this process's environment without what a launcher around the tests may have set."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_PREFIXES)}
    return {**kept, "PYTHONPATH": python_path(ROOT), "OMP_NUM_THREADS": "1"}


def python_path(*folders: object) -> str:
    """Return a PYTHONPATH, with the observers of engines first while a run of tests is recorded."""
    observers = [ROOT / "tests" / "support" / "observed"] if os.environ.get("DCPMLA_OBSERVATIONS") else []
    return os.pathsep.join(map(str, [*observers, *folders]))


def run_together(commands: Sequence[Command], timeout: float = 240, check: bool = True) -> list[Ended]:
    """Run commands at the same time and wait for them all; none is left running.

    Raises:
        AssertionError: with `check`, one failed, or time ran out.
    """
    processes = [
        subprocess.Popen(
            list(map(str, argv)),
            env={**environment(), **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for argv, env in commands
    ]
    deadline = time.monotonic() + timeout
    try:
        results = []
        for process in processes:
            out, err = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
            results.append(Ended(process.args, process.returncode, out, err))
    finally:
        for process in processes:
            _end(process)
    return _checked(results) if check else results


def _checked(results: list[Ended]) -> list[Ended]:
    failed = [result for result in results if result.returncode]
    assert not failed, "\n".join(
        f"{result.args}: exit code {result.returncode}\n{result.stdout[-4000:]}\n{result.stderr[-8000:]}"
        for result in failed
    )
    return results


def run_forked(commands: Sequence[Command], timeout: float = 240, check: bool = True) -> list[Ended]:
    """Run Python programs (by path, or -m) as `run_together` does, forked from a process that has done the imports."""
    with tempfile.TemporaryDirectory() as directory:
        files = [
            tuple(Path(directory) / f"{name} {index}" for name in ("out", "err")) for index in range(len(commands))
        ]
        processes = [
            start_process(run_program, ([*map(str, argv[1:])], {**environment(), **env}, *paths))
            for (argv, env), paths in zip(commands, files, strict=True)
        ]
        deadline = time.monotonic() + timeout
        try:
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
        finally:
            for process in processes:
                process.kill()
                process.join()
        ends = zip(commands, processes, files, strict=True)
        results = [
            Ended(list(map(str, argv)), process.exitcode, *(path.read_text() for path in paths))
            for (argv, _), process, paths in ends
        ]
    return _checked(results) if check else results


def run_program(argv: list[str], env: dict[str, str], *paths: Path) -> None:
    os.environ.clear()
    os.environ.update(env)
    os.chdir(ROOT)
    for descriptor, path in enumerate(paths, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    is_module = argv[0] == "-m"
    sys.argv, sys.orig_argv = argv[is_module:], [sys.executable, *argv]
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


def _end(process: subprocess.Popen[str]) -> None:
    """Terminate a launcher, so that it takes its ranks along; kill it only if it does not end."""
    process.terminate()
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def torchrun(program: Sequence[object], num_local_ranks: int, *options: object) -> list[object]:
    """Return the command of one agent, which without options is the whole job."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *(options or ["--standalone"]),
        "--nproc-per-node",
        num_local_ranks,
        *program,
    ]


def unattended(program: Sequence[object], num_ranks: int) -> list[Command]:
    """Return the commands that torchrun would run on one host, in rank order, to be run without its agent."""
    shared = {
        "WORLD_SIZE": num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": free_port(),
    }
    environments = [{**shared, "RANK": rank, "LOCAL_RANK": rank} for rank in range(num_ranks)]
    return [
        ([sys.executable, *program], {name: str(value) for name, value in environment.items()})
        for environment in environments
    ]


@contextmanager
def restarting() -> Iterator[list[dict[str, str]]]:
    """Keep a job's store, as torchrun's agent does; yield the variables of its ranks at the first and second start."""
    port = free_port()
    store = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    agent = {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "a"}
    yield [{**agent, "TORCHELASTIC_RESTART_COUNT": str(number)} for number in range(2)]
    del store


def mpirun(program: Sequence[object], num_ranks: int, *options: object) -> list[object]:
    """Return the command of mpirun with num_ranks ranks."""
    return [MPIRUN, *options, "-n", num_ranks, sys.executable, *program]


def srun(program: Sequence[object], tasks_per_node: Sequence[int], nodes: str, **more: str) -> list[Command]:
    """Return the commands that srun would run on its nodes, in rank order. `nodes` is Slurm's compressed list."""
    commands: list[Command] = []
    shared = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": str(sum(tasks_per_node)),
        "SLURM_STEP_NUM_TASKS": str(sum(tasks_per_node)),
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, tasks_per_node)),
        **more,
    }
    for node, num_tasks in enumerate(tasks_per_node):
        for task in range(num_tasks):
            own = {"SLURM_NODEID": node, "SLURM_LOCALID": task, "SLURM_PROCID": len(commands)}
            commands.append(
                ([sys.executable, *program], {**shared, **{name: str(number) for name, number in own.items()}})
            )
    return commands


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as listener:
        return listener.getsockname()[1]


def find_mpirun() -> str | None:
    """Return the mpirun that extra `mpi` installed next to this Python, which belongs to the MPI that mpi4py loads."""
    return shutil.which("mpirun", path=Path(sys.executable).parent) if importlib.util.find_spec("mpi4py") else None


MPIRUN = find_mpirun()


def read_lines(results: Sequence[Ended]) -> list[dict[str, Any]]:
    """Return what the ranks of `MEET` printed, in rank order."""
    lines = [json.loads(line) for result in results for line in result.stdout.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda line: line["rank"])


@contextmanager
def two_hosts() -> Iterator[tuple["Host", "Host"]]:
    """Create two network namespaces with addresses of their own, joined by a virtual cable.

    Raises:
        OSError: the kernel, or missing rights, forbid it; with the reason.
    """
    hosts = Host(f"dcpmla{os.getpid()}a", "10.213.7.1"), Host(f"dcpmla{os.getpid()}b", "10.213.7.2")
    try:
        for host in hosts:
            _ip(f"netns add {host.name}")
        _ip(f"link add cable netns {hosts[0].name} type veth peer name cable netns {hosts[1].name}")
        for host in hosts:
            _ip(f"-n {host.name} address add {host.address}/24 dev cable")
            for device in ("lo", "cable"):
                _ip(f"-n {host.name} link set {device} up")
        for host in hosts:
            wait_until(host.is_up, f"the cable of {host.name} is down")
        yield hosts
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "delete", host.name], capture_output=True, check=False)


class Host:
    """A network namespace as a host."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address

    def is_up(self) -> bool:
        """Return whether programs see the cable as running; the kernel says so up to a second after it is set up."""
        return "state UP" in _ip(f"-n {self.name} link show dev cable")

    def command(self, argv: Sequence[object], env: Mapping[str, str]) -> Command:
        """Return the command and variables to run it on this host.

        gloo would look up its own host name, which these hosts share with the real one, so it is told the interface.
        """
        return ["ip", "netns", "exec", self.name, *argv], {**env, "GLOO_SOCKET_IFNAME": "cable"}


def _ip(command: str) -> str:
    result = subprocess.run(["ip", *command.split()], capture_output=True, text=True, check=False)
    if result.returncode:
        raise OSError(f"ip {command}: {result.stderr.strip()}")
    return result.stdout
