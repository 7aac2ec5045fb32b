"""Launchers' variables: what they say of a job, contradictions between them, mpirun's without its MPI."""

import re
import sys
from datetime import timedelta
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpmla.extras import install
from dcpmla.job.launcher import claimed_rank, find_launch_info

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
BASES = {"torchrun": TORCHRUN, "srun": SRUN}


def env_of(words: str) -> dict[str, str]:
    """Return an environment of launchers' variables, and of others that are set (NAME=VALUE) or removed (-NAME)."""
    env: dict[str, str] = {}
    for word in words.split():
        name, is_set, value = word.partition("=")
        if is_set:
            env[name] = value
        elif name.startswith("-"):
            del env[name[1:]]
        else:
            env |= BASES[name]
    return env


VARIABLES = {
    "": ("one process", 0, 1, 0, 1),
    "torchrun": ("torchrun", 5, 8, 1, 4),
    "srun": ("srun", 5, 7, 1, 3),
    # This command as a task of srun on each host.
    "torchrun srun DCPMLA_PARENT=7": ("dcpmla", 5, 8, 1, 4),
    # A batch script and a shell on an allocated node have a task's variables, but are one process.
    "srun -SLURM_STEP_ID": ("one process", 0, 1, 0, 1),
    f"srun SLURM_STEP_ID={0xFFFFFFFA}": ("one process", 0, 1, 0, 1),
    # torchrun's agents are tasks of srun or mpirun; one is the only task; torchrun's variables set by hand.
    "torchrun srun GROUP_WORLD_SIZE=7": ("torchrun", 5, 8, 1, 4),
    "torchrun GROUP_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2": ("torchrun", 5, 8, 1, 4),
    "torchrun srun SLURM_NTASKS=1 SLURM_PROCID=0": ("torchrun", 5, 8, 1, 4),
    "torchrun srun SLURM_NTASKS=8": ("torchrun", 5, 8, 1, 4),
    # srun sets PMI's variables too, if Slurm is configured so.
    "srun PMI_RANK=5 PMI_SIZE=7 PMIX_RANK=5": ("srun", 5, 7, 1, 3),
    "srun -SLURM_STEP_TASKS_PER_NODE SLURM_NTASKS_PER_NODE=4": ("srun", 5, 7, 1, 4),
}


@pytest.mark.parametrize("words", VARIABLES)
def test_variables(words: str) -> None:
    launch = find_launch_info(env_of(words), SOON)
    found = (launch.launcher, launch.rank, launch.num_ranks, launch.local_rank, launch.num_local_ranks)
    assert found == VARIABLES[words]


CONTRADICTIONS = {
    "torchrun -RANK": "WORLD_SIZE is set, but not RANK; set all of RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE",
    "RANK=0": "RANK is set, but not WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE",
    "torchrun RANK=eight": "RANK is 'eight'; it must be a whole number in [0, 7]",
    "torchrun RANK=8": "RANK is '8'; it must be a whole number in [0, 7]",
    "torchrun RANK=-1": "RANK is '-1'; it must be a whole number in [0, 7]",
    "torchrun WORLD_SIZE=": "WORLD_SIZE is ''; it must be a whole number of at least 1",
    "torchrun LOCAL_RANK=4": "LOCAL_RANK is '4'; it must be a whole number in [0, 3]",
    "torchrun LOCAL_WORLD_SIZE=9": "LOCAL_WORLD_SIZE is '9'; it must be a whole number in [1, 8]",
    "torchrun -MASTER_ADDR": "MASTER_ADDR is not set, but WORLD_SIZE is 8; set it to the host of rank 0",
    "torchrun -MASTER_PORT": "MASTER_PORT is not set",
    "torchrun MASTER_PORT=70000": "MASTER_PORT is '70000'; it must be a whole number in [1, 65535]",
    "torchrun OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4": (
        "two launchers contradict each other: RANK is 5 and WORLD_SIZE 8, but OMPI_COMM_WORLD_RANK is 1 and "
        "OMPI_COMM_WORLD_SIZE 4"
    ),
    # torchrun --standalone under `srun -n 7`: seven jobs where one was meant.
    "torchrun srun GROUP_WORLD_SIZE=1": ("but SLURM_PROCID is 5 and SLURM_NTASKS 7; start the ranks with one of them"),
    "torchrun PMI_RANK=5": "PMI_SIZE is not set",
    "srun SLURM_PROCID=7": "SLURM_PROCID is '7'; it must be a whole number in [0, 6]",
    "srun -SLURM_NTASKS": "SLURM_NTASKS is not set; it must be a whole number of at least 1",
    "srun SLURM_STEP_NUM_TASKS=4": "SLURM_NTASKS is 7, but SLURM_STEP_NUM_TASKS 4; srun sets both",
    "srun SLURM_LOCALID=3": "SLURM_LOCALID is '3'; it must be a whole number in [0, 2]",
    "srun SLURM_NODEID=2": "SLURM_NODEID is '2'; it must be a whole number in [0, 1]",
    "srun SLURM_STEP_TASKS_PER_NODE=4;3": "SLURM_STEP_TASKS_PER_NODE is '4;3'; srun sets it to numbers of tasks",
    "srun SLURM_STEP_TASKS_PER_NODE=8": "8 tasks on this node; it must be in [1, SLURM_NTASKS 7]",
    "srun -SLURM_STEP_NODELIST": "SLURM_STEP_NODELIST is not set",
    "srun MASTER_PORT=http": "MASTER_PORT is 'http'; it must be",
}


@pytest.mark.parametrize("words", CONTRADICTIONS)
def test_contradictions(words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(CONTRADICTIONS[words])):
        find_launch_info(env_of(words), SOON)


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
    host, port = address_of(env_of(f"srun SLURM_STEP_NODELIST={nodes}"))
    assert host == first
    other_step = address_of(env_of("srun SLURM_STEP_ID=3"))[1]
    assert 1024 < port != other_step
    assert address_of(env_of("srun MASTER_ADDR=10.0.0.1 MASTER_PORT=29500")) == ("10.0.0.1", 29500)


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
        own = f"SLURM_NTASKS={sum(tasks)} SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID={node}"
        launch = find_launch_info(env_of(f"srun {own} SLURM_STEP_TASKS_PER_NODE={text}"), SOON)
        assert launch.num_local_ranks == (number if sum(tasks) > 1 else 1)


@pytest.mark.parametrize(
    ("words", "rank"),
    [
        ("", None),
        ("RANK=3 OMPI_COMM_WORLD_RANK=1", "3"),
        ("OMPI_COMM_WORLD_RANK=1", "1"),
        ("PMI_RANK=2", "2"),
        ("srun", "5"),
        ("srun -SLURM_STEP_ID", None),
        ("RANK=eight", "eight"),
        ("WORLD_SIZE=2", "?"),
    ],
)
def test_who_speaks_before_the_ranks_meet(words: str, rank: str | None) -> None:
    assert claimed_rank(env_of(words)) == rank


class FakeMPI(ModuleType):
    """A stand-in for mpi4py's MPI module, in a world of one rank."""

    COMM_TYPE_SHARED = 0

    def __init__(self, vendor: str, is_finalized: bool = False) -> None:
        super().__init__("mpi4py.MPI")
        self.get_vendor, self.Is_finalized = lambda: (vendor, (1, 0, 0)), lambda: is_finalized
        self.Is_initialized = lambda: True
        local = SimpleNamespace(rank=0, size=1, Free=lambda: None)
        self.COMM_WORLD = SimpleNamespace(rank=0, size=1, Split_type=lambda _: local, bcast=lambda value: value)


ALONE = "PMI_RANK=0 PMI_SIZE=1"
WITHOUT_MPI = [
    (
        ALONE,
        None,
        "mpirun started this process, but mpi4py or its MPI library does not load .* " + re.escape(install("mpi")),
    ),
    ("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2", FakeMPI("MPICH"), "mpi4py loads MPICH, but .* is Open MPI's"),
    (ALONE, FakeMPI("Open MPI"), "mpi4py loads Open MPI, but the mpirun that started this process is not Open MPI's"),
    (
        "PMI_RANK=1 PMI_SIZE=2",
        FakeMPI("MPICH"),
        "mpirun's PMI_RANK is 1 and PMI_SIZE 2, but mpi4py found rank 0 of 1",
    ),
    (ALONE, FakeMPI("MPICH", is_finalized=True), "MPI was finalized in this process, and starts once only"),
]


@pytest.mark.parametrize(("words", "mpi", "message"), WITHOUT_MPI)
def test_mpirun_without_its_mpi(words: str, mpi: FakeMPI | None, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("mpi4py")
    package.rc, package.MPI = SimpleNamespace(), mpi  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mpi4py", package if mpi else None)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    with pytest.raises(ValueError, match=message):
        find_launch_info(env_of(words), SOON)
