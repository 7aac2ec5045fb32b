"""A process as its launcher numbers it, and the store where the ranks meet (`LaunchInfo`)."""

import socket
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dcpmla.job.identity import JobIdentity
from dcpmla.job.rounds import open_round


@dataclass(frozen=True)
class LaunchInfo:
    """This process as its launcher numbers it.

    Attributes:
        launcher: One of "dcpmla", "torchrun", "mpirun", "srun" or "one process".
        address: Host and port of the store where the ranks meet; None for one process.
        identity: Identity of the job there; None for one process.
        listener: Socket of rank 0 at that address, which reserves the port; None where the store opens it.
    """

    launcher: str
    rank: int
    num_ranks: int
    local_rank: int
    num_local_ranks: int
    address: tuple[str, int] | None = None
    identity: JobIdentity | None = field(default=None, repr=False, compare=False)
    listener: socket.socket | None = field(default=None, repr=False, compare=False)

    def open_store(self, timeout: timedelta) -> dist.Store:
        """Open the store where the ranks meet. Collective."""
        if self.identity is None or self.address is None:
            return dist.HashStore()
        store: Any
        if self.launcher == "torchrun":  # its agent may keep the store while it restarts the ranks
            store = next(dist.rendezvous("env://", self.rank, self.num_ranks, timeout=timeout))[0]
        else:
            # Without wait_for_workers: torch counts every process that connects, also one of another job.
            listener = self.listener.detach() if self.listener else None
            is_server = self.rank == 0 and self.launcher != "dcpmla"  # whose first host's parent keeps the store
            options: Any = {"is_master": is_server, "master_listen_fd": listener}
            store = dist.TCPStore(*self.address, timeout=timeout, wait_for_workers=False, **options)
        return open_round(store, self.identity, self.rank, timeout)
