"""Launchers: detection of torchrun, mpirun, srun, this command or none, of this process's rank and of the ranks' store.

torchrun's variables take precedence over mpirun's, and those over srun's, because each may start the one before it:
torchrun's agents may be tasks of srun or mpirun, and mpirun's daemons tasks of srun. Combinations that cannot be such a
pair are refused. The ranks that this command starts have torchrun's variables and one more.
"""

import re
from collections.abc import Mapping
from datetime import timedelta

from dcpmla.fields import whole
from dcpmla.job.identity import JobIdentity
from dcpmla.job.launch_info import LaunchInfo
from dcpmla.job.mpi import meet_over_mpi

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# Open MPI; MPICH, Intel MPI, Cray.
_MPIRUN = (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"))
_SRUN = ("SLURM_PROCID", "SLURM_NTASKS")
_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # first id of batch scripts and interactive shells, which srun did not start
_PORTS = range(20000, 32000)  # below the ephemeral ports
PARENT = "DCPMLA_PARENT"  # the id of the process that started this rank, if that is this command

Environment = Mapping[str, str]


def find_launch_info(env: Environment, timeout: timedelta) -> LaunchInfo:
    """Read the launcher's variables.

    Under mpirun this is a collective over MPI, which it initializes and finalizes unless the caller has initialized it;
    there, a rank whose peers do not come within the timeout ends its process.

    Raises:
        ValueError: Variables that are missing, not numbers, out of range or in contradiction to another launcher's;
            mpirun without mpi4py.
    """
    if any(name in env for name in _TORCHRUN):
        return _torchrun(env)
    if _is_mpirun(env):
        return _mpirun(env, timeout)
    if _is_srun(env):
        return _srun(env)
    return LaunchInfo("one process", 0, 1, 0, 1)


def is_started(env: Environment, nnodes: int) -> bool:
    """Return whether this process is a rank already: this command or a launcher has started one process for each.

    Under srun it is none where the step has a task for each of the job's hosts.
    """
    if any(name in env for name in _TORCHRUN) or _is_mpirun(env):
        return True
    return _is_srun(env) and env.get("SLURM_NTASKS") != str(nnodes)


def claimed_rank(env: Environment) -> str | None:
    """Return the rank that a launcher's variables claim, unchecked, for messages before the ranks have met, or None."""
    if any(name in env for name in _TORCHRUN):
        return env.get("RANK", "?")
    names = [*(rank for rank, _ in _MPIRUN), "PMIX_RANK", *(["SLURM_PROCID"] if _is_srun(env) else [])]
    return next((env[name] for name in names if name in env), None)


def _torchrun(env: Environment) -> LaunchInfo:
    if missing := [name for name in _TORCHRUN if name not in env]:
        found = next(name for name in _TORCHRUN if name in env)
        raise ValueError(
            f"{found} is set, but not {', '.join(missing)}; set all of {', '.join(_TORCHRUN)} as torchrun does, or none"
        )
    num_ranks = _number(env, "WORLD_SIZE", 1)
    num_local = _number(env, "LOCAL_WORLD_SIZE", 1, num_ranks)
    rank, local_rank = _number(env, "RANK", 0, num_ranks - 1), _number(env, "LOCAL_RANK", 0, num_local - 1)
    launcher = "dcpmla" if PARENT in env else "torchrun"
    if launcher == "torchrun":
        _check_agents(env, rank, num_ranks)
    if num_ranks == 1:
        return LaunchInfo(launcher, 0, 1, 0, 1)
    if not env.get("MASTER_ADDR"):
        raise ValueError(
            f"MASTER_ADDR is not set, but WORLD_SIZE is {num_ranks}; set it to the host of rank 0, as torchrun does"
        )
    address = env["MASTER_ADDR"], _number(env, "MASTER_PORT", 1, 65535)
    identity = JobIdentity(launcher, env.get("TORCHELASTIC_RUN_ID", ""), "", num_ranks)
    return LaunchInfo(launcher, rank, num_ranks, local_rank, num_local, address, identity)


def _check_agents(env: Environment, rank: int, num_ranks: int) -> None:
    """Check that another launcher's tasks are torchrun's agents (one a host) or these very ranks."""
    for rank_name, size_name in (*_MPIRUN, *([_SRUN] if _is_srun(env) else [])):
        if rank_name not in env and size_name not in env:
            continue
        size = _number(env, size_name, 1)
        outer_rank = _number(env, rank_name, 0, size - 1)
        if size == 1 or env.get("GROUP_WORLD_SIZE") == str(size) or (outer_rank, size) == (rank, num_ranks):
            continue
        raise ValueError(
            f"two launchers contradict each other: RANK is {rank} and WORLD_SIZE {num_ranks}, but {rank_name} is "
            f"{outer_rank} and {size_name} {size}; start the ranks with one of them, or torchrun once a host (with "
            f"--nnodes {size})"
        )


def _is_mpirun(env: Environment) -> bool:
    """Return whether mpirun started this process; srun --mpi sets variables of PMI and PMIx too.

    Only mpirun sets Open MPI's variables, or the variables of Hydra, the launcher of MPICH and Intel MPI.
    """
    own = any(name in env for name in ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "MPI_LOCALRANKID"))
    return own or (not _is_srun(env) and any(name in env for name in ("PMI_RANK", "PMI_SIZE", "PMIX_RANK")))


def _mpirun(env: Environment, timeout: timedelta) -> LaunchInfo:
    of_open_mpi, job = "OMPI_COMM_WORLD_SIZE" in env, env.get("PMIX_NAMESPACE", "")
    launch = meet_over_mpi(env.get("MASTER_ADDR"), of_open_mpi, job, claimed_rank(env) or "?", timeout)
    found = str(launch.rank), str(launch.num_ranks)
    for rank_name, size_name in _MPIRUN:
        claimed = env.get(rank_name, found[0]), env.get(size_name, found[1])
        if claimed != found:
            raise ValueError(
                f"mpirun's {rank_name} is {claimed[0]} and {size_name} {claimed[1]}, but mpi4py found rank {found[0]} "
                f"of {found[1]}; use the mpirun that belongs to mpi4py's MPI"
            )
    return launch if launch.num_ranks > 1 else LaunchInfo("mpirun", 0, 1, 0, 1)


def _is_srun(env: Environment) -> bool:
    """Return whether srun started this task; a batch script, one process, also has SLURM_PROCID and SLURM_NTASKS."""
    step = env.get("SLURM_STEP_ID", "")
    return step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP


def _srun(env: Environment) -> LaunchInfo:
    num_ranks = _number(env, "SLURM_NTASKS", 1)
    rank = _number(env, "SLURM_PROCID", 0, num_ranks - 1)
    if env.get("SLURM_STEP_NUM_TASKS", str(num_ranks)) != str(num_ranks):
        raise ValueError(
            f"SLURM_NTASKS is {num_ranks}, but SLURM_STEP_NUM_TASKS {env['SLURM_STEP_NUM_TASKS']}; srun sets both to "
            "its tasks"
        )
    num_local = _num_local_tasks(env, num_ranks)
    local_rank = _number(env, "SLURM_LOCALID", 0, num_local - 1)
    if num_ranks == 1:
        return LaunchInfo("srun", 0, 1, 0, 1)
    address = _srun_address(env)
    identity = JobIdentity("srun", env.get("SLURM_JOB_ID", ""), env.get("SLURM_STEP_ID", ""), num_ranks)
    return LaunchInfo("srun", rank, num_ranks, local_rank, num_local, address, identity)


def _num_local_tasks(env: Environment, num_ranks: int) -> int:
    """Read this node's entry of SLURM_STEP_TASKS_PER_NODE; 4(x2),3 means two nodes of four tasks, then one of three."""
    text = env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_NTASKS_PER_NODE", "missing"))
    groups = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", group) for group in text.split(",")]
    if not all(groups):
        raise ValueError(f"SLURM_STEP_TASKS_PER_NODE is {text!r}; srun sets it to numbers of tasks, as in 4(x2),3")
    tasks = [int(group[1]) for group in groups if group for _ in range(int(group[2] or 1))]
    node = _number(env, "SLURM_NODEID", 0, len(tasks) - 1) if len(tasks) > 1 else 0
    if not 1 <= tasks[node] <= num_ranks:
        raise ValueError(
            f"SLURM_STEP_TASKS_PER_NODE is {text!r}, {tasks[node]} tasks on this node; it must be in [1, SLURM_NTASKS "
            f"{num_ranks}]"
        )
    return tasks[node]


def _srun_address(env: Environment) -> tuple[str, int]:
    """Choose the host and port where srun's ranks meet.

    The host is MASTER_ADDR or the first of the step's compressed node list (`rack[1-2]n[03-05,7],login` starts with
    rack1n03). The port is MASTER_PORT or derived from job and step. Two jobs may get the same one, so their ranks
    compare identities there (`open_round`).
    """
    nodes = env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", ""))
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", nodes)
    host = env.get("MASTER_ADDR") or re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0] if first else "")
    if not host:
        raise ValueError(
            "SLURM_STEP_NODELIST is not set; srun sets it to the step's nodes: set MASTER_ADDR to the host of rank 0"
        )
    if "MASTER_PORT" in env:
        return host, _number(env, "MASTER_PORT", 1, 65535)
    job, step = _number(env, "SLURM_JOB_ID", 0), _number(env, "SLURM_STEP_ID", 0)
    return host, _PORTS[(job * 16 + step) % len(_PORTS)]


def _number(env: Environment, name: str, lowest: int, highest: int | None = None) -> int:
    rule, text = whole(lowest, highest), env.get(name)
    if text is None or not re.fullmatch(r"[0-9]+", text) or not rule.holds(int(text)):
        raise ValueError(f"{name} is {'not set' if text is None else repr(text)}; it must be {rule.words}")
    return int(text)
