"""Which exchange backend a group uses, and why."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup

from dcpmla.comm.exchange import Exchange, LocalExchange
from dcpmla.comm.nccl import AllGatherReduceScatter, AllToAll


@dataclass(frozen=True)
class Selection:
    """An exchange with a sentence for people on how it was chosen."""

    exchange: Exchange
    reason: str


def select_exchange(dcp_comm_backend: str, dcp_group: ProcessGroup) -> Selection:
    """Build the exchange for a DCP group.

    Args:
        dcp_comm_backend: "ag_rs", "a2a" or "auto" (checked by DCPConfig).
    """
    if dist.get_world_size(dcp_group) == 1:
        return Selection(LocalExchange(), "the cache is not sharded, nothing moves")
    if dcp_comm_backend == "ag_rs":
        return Selection(AllGatherReduceScatter(dcp_group), "asked for")
    if dcp_comm_backend == "a2a":
        return Selection(AllToAll(dcp_group), "asked for")
    return Selection(AllToAll(dcp_group), "auto: one collective a combine where ag_rs needs two")
