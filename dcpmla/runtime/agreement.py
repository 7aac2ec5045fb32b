"""Agreement of all ranks once a step: on the first rank's tokens and clock, and on whose callbacks failed."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dcpmla.parallel.collectives import named
from dcpmla.parallel.mesh import DCPMesh

_MICROSECOND = 1e-6


@dataclass(frozen=True)
class Agreed:
    """The values that are the same on every rank.

    Attributes:
        now: seconds on the first rank's clock.
        token_ids: the first rank's.
        failed: which of the flags that each rank gave were set on any.
    """

    now: float
    token_ids: list[int]
    failed: list[bool]


class Agreement:
    """The engine's clock, and its only collective besides the model's: one small all-reduce a step."""

    def __init__(self, mesh: DCPMesh, device: torch.device) -> None:
        self._mesh, self._device = mesh, device
        self.restart_clock()

    def restart_clock(self) -> None:
        """Let the clock begin at 0."""
        self._started = time.monotonic()

    def reach(self, tokens: Tensor, failed: Sequence[bool]) -> Agreed:
        """Exchange a step's outcome. Collective over the TP group, with as many tokens and flags on every rank.

        Args:
            tokens: [n] int64, chosen on this rank.
            failed: flags that any rank may set.
        """
        mine = [int((time.monotonic() - self._started) / _MICROSECOND), *tokens.tolist()]
        message = [*(mine if self._mesh.tp_rank == 0 else [0] * len(mine)), *map(int, failed)]
        if self._mesh.tp_size > 1:
            # A sum, to whose first numbers the other ranks add nothing: unlike a broadcast it ends nowhere before all
            # ranks have come, with sound steps.
            total = torch.tensor(message, device=self._device)
            with named("agreeing on new tokens", self._mesh.tp_group):
                dist.all_reduce(total, group=self._mesh.tp_group)
            message = total.tolist()
        microseconds, *token_ids = message[: len(mine)]
        return Agreed(microseconds * _MICROSECOND, token_ids, [count > 0 for count in message[len(mine) :]])
