"""Start-up under mpirun: MPI numbers the ranks and broadcasts an address, then is finalized before any tensor moves.

An MPI that stayed initialized would have to be finalized by all ranks together, and a failing rank would hang there.
"""

import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from dcpmla.extras import install
from dcpmla.job.identity import JobIdentity
from dcpmla.job.launch_info import LaunchInfo
from dcpmla.job.rendezvous import listen_for_ranks

_INSTALL = f"install both with: {install('mpi')}"
# Kills its parent and says why, unless its input ends in time: then the parent is through, or gone.
_GUARD = """
import os, select, signal, sys
parent, seconds, line = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
if not select.select([0], [], [], seconds)[0]:
    os.write(2, line.encode())
    os.kill(parent, signal.SIGKILL)
"""


def meet_over_mpi(host: str | None, wants_open_mpi: bool, job: str, rank: str, timeout: timedelta) -> LaunchInfo:
    """Agree on a free port of rank 0's host.

    Collective over MPI; ends the process if the others do not come within the timeout.

    Args:
        host: Name or address at which the others reach rank 0; None takes its host name.
        wants_open_mpi: Whether the mpirun that started this process is Open MPI's.
        job: Name that mpirun has given the job; "" where it has none.
        rank: Name of this process in messages, before MPI has numbered it.
    Raises:
        ValueError: No mpi4py, no MPI library, another MPI than mpirun's, or one that is finalized already.
    """
    MPI = _load(wants_open_mpi)
    with _deadline(rank, timeout), _initialized(MPI):
        world = MPI.COMM_WORLD
        local = world.Split_type(MPI.COMM_TYPE_SHARED)
        name = host or _own_name(local.size == world.size)
        listener = listen_for_ranks(name) if world.rank == 0 else None
        own = (name, listener.getsockname()[1], uuid.uuid4().hex) if listener else None
        host, port, nonce = world.bcast(own)
        identity = JobIdentity("mpirun", job, "", world.size, nonce)
        numbers = world.rank, world.size, local.rank, local.size
        local.Free()
        return LaunchInfo("mpirun", *numbers, (host, port), identity, listener)


def _load(wants_open_mpi: bool) -> Any:
    try:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False  # MPI_Init ends the process if the MPI is not mpirun's
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ValueError(
            f"mpirun started this process, but mpi4py or its MPI library does not load ({error}); {_INSTALL}"
        ) from error
    vendor = MPI.get_vendor()[0]
    if (vendor == "Open MPI") != wants_open_mpi:
        started = "Open MPI's" if wants_open_mpi else "not Open MPI's"
        raise ValueError(
            f"mpi4py loads {vendor}, but the mpirun that started this process is {started}; use the mpirun that "
            "belongs to it"
        )
    if MPI.Is_finalized():
        raise ValueError(
            "MPI was finalized in this process, and starts once only: initialize it yourself to start from mpirun twice"
        )
    return MPI


@contextmanager
def _initialized(MPI: Any) -> Iterator[None]:
    ours = not MPI.Is_initialized()
    if ours:
        MPI.Init()
    yield
    if ours:
        MPI.Finalize()


@contextmanager
def _deadline(rank: str, timeout: timedelta) -> Iterator[None]:
    """Kill this process if the block, which waits in MPI, takes longer than the timeout.

    mpirun does not end ranks whose peers are gone, and no thread could: MPI.Init holds Python's lock.
    """
    seconds = timeout.total_seconds()
    line = (
        f"\ndcpmla: error: rank {rank} (started by mpirun) did not meet the others within {seconds:.0f} s: they did "
        "not start MPI; see that all ranks were started, and what they say\n"
    )
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid()), str(seconds), line], stdin=subprocess.PIPE
    )
    assert guard.stdin is not None
    try:
        yield
    finally:
        guard.stdin.close()
        guard.wait()


def _own_name(alone: bool) -> str:
    """Return the name under which the others reach this host: for ranks of one host, an address of it alone."""
    return "127.0.0.1" if alone else socket.gethostname()
