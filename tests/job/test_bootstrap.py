"""Launchers' variables, read and contradicted; jobs that torchrun, mpirun and srun really start."""

import os
import socket
import sys
import time
import weakref
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from dcpmla.job.bootstrap import assign_device, process_groups, read_launcher
from dcpmla.job.launcher import claimed_rank, find_launch_info
from tests.support.launchers import (
    GENERATE,
    MEET,
    MPIRUN,
    ROOT,
    mpirun,
    read_lines,
    run_forked,
    run_together,
    srun,
    torchrun,
)

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "n[1-2]",
}
SOON = timedelta(seconds=20)
needs_mpirun = pytest.mark.skipif(MPIRUN is None, reason="mpirun and mpi4py of extra `mpi` are not installed")


def change(env: dict[str, str], **changes: str | None) -> dict[str, str]:
    """Return env with some variables set and others (None) removed."""
    return {name: value for name, value in {**env, **changes}.items() if value is not None}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, ("one process", 0, 1, 0, 1)),
        (TORCHRUN, ("torchrun", 5, 8, 1, 4)),
        (SRUN, ("srun", 5, 7, 1, 3)),
        # A batch script and a shell on an allocated node have a task's variables, but are one process.
        (change(SRUN, SLURM_STEP_ID=None), ("one process", 0, 1, 0, 1)),
        (change(SRUN, SLURM_STEP_ID=str(0xFFFFFFFA)), ("one process", 0, 1, 0, 1)),
        # torchrun's agents are tasks of srun or mpirun; one is the only task; torchrun's variables set by hand.
        ({**TORCHRUN, **SRUN, "GROUP_WORLD_SIZE": "7"}, ("torchrun", 5, 8, 1, 4)),
        (
            {**TORCHRUN, "GROUP_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
            ("torchrun", 5, 8, 1, 4),
        ),
        ({**TORCHRUN, **SRUN, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, ("torchrun", 5, 8, 1, 4)),
        ({**TORCHRUN, **SRUN, "SLURM_NTASKS": "8"}, ("torchrun", 5, 8, 1, 4)),
        # srun sets PMI's variables too, if Slurm is configured so.
        ({**SRUN, "PMI_RANK": "5", "PMI_SIZE": "7", "PMIX_RANK": "5"}, ("srun", 5, 7, 1, 3)),
        (change(SRUN, SLURM_STEP_TASKS_PER_NODE=None, SLURM_NTASKS_PER_NODE="4"), ("srun", 5, 7, 1, 4)),
    ],
)
def test_variables(env: dict[str, str], expected: tuple[Any, ...]) -> None:
    launch = find_launch_info(env, SOON)
    assert (launch.launcher, launch.rank, launch.num_ranks, launch.local_rank, launch.num_local_ranks) == expected


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (
            change(TORCHRUN, RANK=None),
            "WORLD_SIZE is set, but not RANK; set all of RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE",
        ),
        ({"RANK": "0"}, "RANK is set, but not WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE"),
        (change(TORCHRUN, RANK="eight"), "RANK is 'eight'; it must be a whole number in [0, 7]"),
        (change(TORCHRUN, RANK="8"), "RANK is '8'; it must be a whole number in [0, 7]"),
        (change(TORCHRUN, RANK="-1"), "RANK is '-1'; it must be a whole number in [0, 7]"),
        (change(TORCHRUN, WORLD_SIZE=""), "WORLD_SIZE is ''; it must be a whole number of at least 1"),
        (change(TORCHRUN, LOCAL_RANK="4"), "LOCAL_RANK is '4'; it must be a whole number in [0, 3]"),
        (change(TORCHRUN, LOCAL_WORLD_SIZE="9"), "LOCAL_WORLD_SIZE is '9'; it must be a whole number in [1, 8]"),
        (
            change(TORCHRUN, MASTER_ADDR=None),
            "MASTER_ADDR is not set, but WORLD_SIZE is 8; set it to the host of rank 0",
        ),
        (change(TORCHRUN, MASTER_PORT=None), "MASTER_PORT is not set"),
        (change(TORCHRUN, MASTER_PORT="70000"), "MASTER_PORT is '70000'; it must be a whole number in [1, 65535]"),
        (
            {**TORCHRUN, "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"},
            "two launchers contradict each other: RANK is 5 and WORLD_SIZE 8, but OMPI_COMM_WORLD_RANK is 1 and "
            "OMPI_COMM_WORLD_SIZE 4",
        ),
        # torchrun --standalone under `srun -n 7`: seven jobs where one was meant.
        (
            {**TORCHRUN, **SRUN, "GROUP_WORLD_SIZE": "1"},
            "but SLURM_PROCID is 5 and SLURM_NTASKS 7; start the ranks with one of them",
        ),
        ({**TORCHRUN, "PMI_RANK": "5"}, "PMI_SIZE is not set"),
        (change(SRUN, SLURM_PROCID="7"), "SLURM_PROCID is '7'; it must be a whole number in [0, 6]"),
        (change(SRUN, SLURM_NTASKS=None), "SLURM_NTASKS is not set; it must be a whole number of at least 1"),
        (change(SRUN, SLURM_STEP_NUM_TASKS="4"), "SLURM_NTASKS is 7, but SLURM_STEP_NUM_TASKS 4; srun sets both"),
        (change(SRUN, SLURM_LOCALID="3"), "SLURM_LOCALID is '3'; it must be a whole number in [0, 2]"),
        (change(SRUN, SLURM_NODEID="2"), "SLURM_NODEID is '2'; it must be a whole number in [0, 1]"),
        (
            change(SRUN, SLURM_STEP_TASKS_PER_NODE="4;3"),
            "SLURM_STEP_TASKS_PER_NODE is '4;3'; srun sets it to numbers of tasks",
        ),
        (change(SRUN, SLURM_STEP_TASKS_PER_NODE="8"), "8 tasks on this node; it must be in [1, SLURM_NTASKS 7]"),
        (change(SRUN, SLURM_STEP_NODELIST=None), "SLURM_STEP_NODELIST is not set"),
        (change(SRUN, MASTER_PORT="http"), "MASTER_PORT is 'http'; it must be"),
    ],
)
def test_contradictions(env: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        find_launch_info(env, SOON)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n[03-05,7],login", "n03"),
        ("gpu-a.example.org", "gpu-a.example.org"),
        ("rack[2-3]n[11,13]x", "rack2n11x"),
        ("a,b[1-2]", "a"),
    ],
)
def test_srun_meets_on_the_first_node(nodes: str, first: str) -> None:
    host, port = address_of(change(SRUN, SLURM_STEP_NODELIST=nodes))
    assert host == first
    other_step = address_of(change(SRUN, SLURM_STEP_ID="3"))[1]
    assert 1024 < port != other_step
    assert address_of(change(SRUN, MASTER_ADDR="10.0.0.1", MASTER_PORT="29500")) == ("10.0.0.1", 29500)


def address_of(env: dict[str, str]) -> tuple[str, int]:
    address = find_launch_info(env, SOON).address
    assert address is not None
    return address


@given(st.lists(st.integers(1, 3), min_size=1, max_size=12))
def test_slurm_s_tasks_per_node(tasks: list[int]) -> None:
    """Slurm writes neighbours of equal number as 3(x2)."""
    groups: list[list[int]] = []
    for number in tasks:
        if groups and groups[-1][0] == number:
            groups[-1][1] += 1
        else:
            groups.append([number, 1])
    text = ",".join(f"{number}(x{times})" if times > 1 else str(number) for number, times in groups)
    for node, number in enumerate(tasks):
        env = change(SRUN, SLURM_NTASKS=str(sum(tasks)), SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NODEID=str(node))
        launch = find_launch_info({**env, "SLURM_STEP_TASKS_PER_NODE": text}, SOON)
        assert launch.num_local_ranks == (number if sum(tasks) > 1 else 1)


@pytest.mark.parametrize(
    ("env", "rank"),
    [
        ({}, None),
        ({"RANK": "3", "OMPI_COMM_WORLD_RANK": "1"}, "3"),
        ({"OMPI_COMM_WORLD_RANK": "1"}, "1"),
        ({"PMI_RANK": "2"}, "2"),
        (SRUN, "5"),
        (change(SRUN, SLURM_STEP_ID=None), None),
        ({"RANK": "eight"}, "eight"),
        ({"WORLD_SIZE": "2"}, "?"),
    ],
)
def test_who_speaks_before_the_ranks_meet(env: dict[str, str], rank: str | None) -> None:
    assert claimed_rank(env) == rank


@pytest.mark.parametrize(
    ("asked", "num_gpus", "expected"),
    [("auto", 8, "cuda:1"), ("auto", 0, "cpu"), ("cpu", 8, "cpu"), ("cuda", 4, "cuda:1")],
)
def test_all_ranks_of_a_host_take_the_same_kind_of_device(
    asked: str, num_gpus: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA_VISIBLE_DEVICES, which transformers reads, agrees with the device."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    for name, value in {**TORCHRUN, "CUDA_VISIBLE_DEVICES": "all"}.items():
        monkeypatch.setenv(name, value)
    ranks = read_launcher(asked)
    assert (ranks.rank, ranks.num_ranks, str(ranks.device)) == (5, 8, expected)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ("" if expected == "cpu" else "all")
    assert (
        ranks.origin
        == f"8 ranks, 4 of them on this host, started by torchrun, on {'CPUs' if expected == 'cpu' else 'GPUs'}"
    )


@pytest.mark.parametrize(("asked", "num_gpus"), [("cuda", 0), ("cuda", 3), ("auto", 1), ("auto", 3)])
def test_too_few_gpus(asked: str, num_gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank silently falls back to the CPU, also where each is shown one GPU of its own."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    for env, hint in (
        (TORCHRUN, "CUDA_VISIBLE_DEVICES"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "3,4"}, "no --gpus-per-task"),
    ):
        with pytest.raises(
            ValueError, match=f"'{asked}', but a rank sees {num_gpus} GPUs for 4 ranks of its host.*{hint}"
        ):
            assign_device(asked, find_launch_info(env, SOON))


def check_met(lines: list[dict[str, Any]], local_ranks: list[int], launcher: str) -> None:
    """Check that all ranks are there with their numbers, and that torchrun's variables agree."""
    size = len(local_ranks)
    assert [line["rank"] for line in lines] == list(range(size))
    assert [line["local_rank"] for line in lines] == local_ranks
    assert all(line["sum"] == sum(10.0**rank for rank in range(size)) for line in lines)
    assert [line["neighbour"] for line in lines] == [(rank + 1) % size for rank in range(size)]
    assert all(
        line["origin"].startswith(f"{size} ranks, ") and line["origin"].endswith(f"started by {launcher}, on CPUs")
        for line in lines
    )
    for line in lines:
        env = line["environment"]
        assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"]) == (
            str(line["rank"]),
            str(size),
            str(line["local_rank"]),
        )
        assert f"{env['LOCAL_WORLD_SIZE']} of them on this host" in line["origin"]


def test_torchrun() -> None:
    lines = read_lines(run_together([(torchrun(MEET, 2), {"TORCH_FR_BUFFER_SIZE": "7"})]))
    check_met(lines, [0, 1], "torchrun")
    kept = {
        "TORCH_FR_BUFFER_SIZE": "7",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }  # the user's setting is kept, the rest is turned on
    assert all(kept.items() <= line["environment"].items() for line in lines)


def test_srun() -> None:
    """Two tasks on one node and one on another meet on a port derived from the job."""
    lines = read_lines(run_together(srun(MEET, [2, 1], "localhost,elsewhere")))
    check_met(lines, [0, 1, 0], "srun")
    assert [line["environment"]["LOCAL_WORLD_SIZE"] for line in lines] == ["2", "2", "1"]


def test_slurm_script(tmp_path: Path) -> None:
    """The script hands its arguments to srun; a prompt with spaces stays one argument."""
    (tmp_path / "srun").write_text('#!/bin/sh\nprintf "%s\\n" "$OMP_NUM_THREADS" "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": "/repository"}
    (result,) = run_together([(["bash", ROOT / "launch" / "slurm.sbatch", "--prompt", "two words"], env)])
    python = "/repository/.venv/bin/python"
    assert result.stdout.splitlines() == ["1", "--kill-on-bad-exit=1", python, *GENERATE, "--prompt", "two words"]


@needs_mpirun
def test_mpirun() -> None:
    check_met(read_lines(run_together([(mpirun(MEET, 3), {})])), [0, 1, 2], "mpirun")


class FakeMPI(ModuleType):
    """A stand-in for mpi4py's MPI module, in a world of one rank."""

    COMM_TYPE_SHARED = 0

    def __init__(self, vendor: str, is_finalized: bool = False) -> None:
        super().__init__("mpi4py.MPI")
        self.get_vendor, self.Is_finalized, self.Is_initialized = (
            lambda: (vendor, (1, 0, 0)),
            lambda: is_finalized,
            lambda: True,
        )
        local = SimpleNamespace(rank=0, size=1, Free=lambda: None)
        self.COMM_WORLD = SimpleNamespace(rank=0, size=1, Split_type=lambda _: local, bcast=lambda value: value)


ALONE = {"PMI_RANK": "0", "PMI_SIZE": "1"}


@pytest.mark.parametrize(
    ("env", "mpi", "message"),
    [
        (
            ALONE,
            None,
            r"mpirun started this process, but mpi4py or its MPI library does not load .* pip install 'dcpmla\[mpi\]'",
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
            FakeMPI("MPICH"),
            "mpi4py loads MPICH, but .* is Open MPI's",
        ),
        (
            ALONE,
            FakeMPI("Open MPI"),
            "mpi4py loads Open MPI, but the mpirun that started this process is not Open MPI's",
        ),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2"},
            FakeMPI("MPICH"),
            "mpirun's PMI_RANK is 1 and PMI_SIZE 2, but mpi4py found rank 0 of 1",
        ),
        (ALONE, FakeMPI("MPICH", is_finalized=True), "MPI was finalized in this process, and starts once only"),
    ],
)
def test_mpirun_without_its_mpi(
    env: dict[str, str], mpi: FakeMPI | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = ModuleType("mpi4py")
    package.rc, package.MPI = SimpleNamespace(), mpi  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mpi4py", package if mpi else None)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    with pytest.raises(ValueError, match=message):
        find_launch_info(env, SOON)


@needs_mpirun
def test_mpirun_ends_ranks_that_wait_in_mpi() -> None:
    """The second rank ends before it starts MPI, which mpirun tolerates."""
    imports = "from datetime import timedelta; from dcpmla.job.bootstrap import read_launcher"
    wait = f"{imports}; read_launcher('cpu', timedelta(seconds=2))"
    (result,) = run_together(
        [([*mpirun(["-c", wait], 1), ":", "-n", 1, sys.executable, "-c", "raise SystemExit(2)"], {})], check=False
    )
    assert "dcpmla: error: rank 0 (started by mpirun) did not meet the others within 2 s" in result.stderr


def test_a_listener_that_never_speaks() -> None:
    with socket.create_server(("localhost", 0)) as listener:
        port, started = listener.getsockname()[1], time.monotonic()
        _, second = srun([*BROKEN, "--timeout", 1], [2], "localhost", MASTER_PORT=str(port))
        (result,) = run_forked([second], check=False, timeout=60)
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert f"localhost:{port} is not rank 0, or is stopped: set another MASTER_PORT" in result.stderr
    assert time.monotonic() - started < 30


BROKEN = [*GENERATE, "--model", "/no/such/model", "--prompt-ids", "5", "--device", "cpu", "-tp", "2"]


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),  # before the ranks meet
        (["-tp", "4"], "tensor_parallel_size (-tp) is 4, but 2 ranks were started"),
        (["--device", "cuda"], "device (--device) is 'cuda', but a rank sees 0 GPUs for 2 ranks of its host"),
    ],
)
def test_a_mistake_of_one_rank_is_the_jobs(theirs: list[str], words: str) -> None:
    first, (argv, env) = srun(BROKEN, [2], "localhost")
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    results = run_forked(
        [(first[0], {**first[1], **hidden}), ([*argv, *theirs], {**env, **hidden})], check=False, timeout=60
    )
    assert [result.returncode for result in results] == [2, 2]
    text = "".join(result.stderr for result in results)
    assert text.count("dcpmla: error: ") == 1
    assert f"dcpmla: error: rank 1: {words}" in text


def test_a_host_name_that_does_not_resolve() -> None:
    (result,) = run_forked(
        [srun([*BROKEN, "--timeout", 1], [2], "localhost", MASTER_ADDR="no.such.host")[1]], check=False, timeout=60
    )
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "the host name 'no.such.host' does not resolve here" in result.stderr


def test_a_launch_is_read_as_often_as_one_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's variables, set for transformers, are gone with the process groups."""
    for name, value in change(
        SRUN, SLURM_NTASKS="1", SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_STEP_TASKS_PER_NODE="1"
    ).items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        ranks = read_launcher("cpu")
        with process_groups(ranks, dist.HashStore(), SOON):
            assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "1")
        assert "RANK" not in os.environ


def test_groups_end_after_what_an_error_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL would wait for a decode graph of a call that has failed."""

    class Graph:
        pass

    graphs: list[weakref.ref[Graph]] = []

    def load() -> None:
        graph = Graph()
        graphs.append(weakref.ref(graph))
        raise ValueError("no room")

    destroy = dist.destroy_process_group
    held: list[bool] = []

    def destroy_groups() -> None:
        held.append(graphs[0]() is not None)
        destroy()

    monkeypatch.setattr(dist, "destroy_process_group", destroy_groups)
    with pytest.raises(ValueError, match="no room"), process_groups(read_launcher("cpu"), dist.HashStore(), SOON):
        load()
    assert held == [False]
