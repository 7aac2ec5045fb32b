"""Agreement of all ranks on a step: on the first rank's tokens and clock, and on whose callbacks failed."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dcpmla.parallel.collectives import named
from dcpmla.parallel.mesh import DCPMesh

_MICROSECOND = 1e-6
_OPERATION = "agreeing on new tokens"


@dataclass(frozen=True)
class Agreed:
    """The values that are the same on every rank.

    Attributes:
        now: seconds on the first rank's clock.
        failed: which of the flags that each rank gave were set on any.
    """

    now: float
    failed: list[bool]


class Agreement:
    """The engine's clock, and its only collectives besides the model's, two a step: tokens where they are, in the order
    of the device's work; clock and flags between the hosts, which so wait for each other but not for the device.
    """

    def __init__(self, mesh: DCPMesh) -> None:
        self._mesh = mesh
        self._hosts: ProcessGroup | None = None if mesh.tp_size == 1 else _group_of_hosts(mesh.tp_group)
        self.restart_clock()

    def restart_clock(self) -> None:
        """Let the clock begin at 0."""
        self._started = time.monotonic()

    def choose(self, tokens: Tensor) -> Tensor:
        """Return the first rank's tokens. Collective over the TP group, with as many tokens on every rank.

        Args:
            tokens: [n] int64, chosen on this rank; overwritten.
        """
        if self._mesh.tp_size > 1 and len(tokens):
            with named(_OPERATION, self._mesh.tp_group):
                dist.broadcast(tokens, group=self._mesh.tp_group, group_src=0)
        return tokens

    def reach(self, failed: Sequence[bool]) -> Agreed:
        """Exchange a step's outcome. Collective over the TP group, with as many flags on every rank.

        Args:
            failed: flags that any rank may set.
        """
        now = int((time.monotonic() - self._started) / _MICROSECOND)
        message = [now if self._mesh.tp_rank == 0 else 0, *map(int, failed)]
        if self._hosts is not None:
            # A sum, to whose first number the other ranks add nothing: unlike a broadcast it ends nowhere before all
            # ranks have come, with sound steps.
            total = torch.tensor(message)
            with named(_OPERATION, self._hosts):
                dist.all_reduce(total, group=self._hosts)
            message = total.tolist()
        return Agreed(message[0] * _MICROSECOND, [count > 0 for count in message[1:]])

    def close(self) -> None:
        """Free what was made for the agreement."""
        if self._hosts is not None and self._hosts is not self._mesh.tp_group:
            dist.destroy_process_group(self._hosts)
        self._hosts = None


def _group_of_hosts(group: ProcessGroup) -> ProcessGroup:
    """Return a group of the same ranks whose collectives take tensors of the CPU: the group itself, if it does."""
    if dist.get_backend(group) == "gloo":
        return group
    ranks = dist.get_process_group_ranks(group)
    hosts: ProcessGroup = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return hosts
