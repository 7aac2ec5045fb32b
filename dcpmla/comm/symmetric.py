"""Memory of a GPU that all ranks of its group can write to."""

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class PeerMemory:
    """The same number of bytes on each rank of a group, in reach of all its ranks.

    Attributes:
        mine: [N] uint8, this rank's.
        addresses: [W] int64 on the device, where each rank's begins, as this rank sees it.
        owner: object that must live as long as the memory is used.
    """

    mine: Tensor
    addresses: Tensor
    owner: object


Allocate = Callable[[int, ProcessGroup, torch.device], PeerMemory]


def allocate(num_bytes: int, group: ProcessGroup, device: torch.device) -> PeerMemory:
    """Allocate torch's symmetric memory, over NVLink, one address for each rank. Collective over the group."""
    # No multicast, ever: a host's fabric may have it switched off, and where it is on, one crash can take it from
    # everyone.
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    # From torch 2.13 on: no pool, which would keep what is dropped and take it for memory that all ranks have met over.
    os.environ["TORCH_SYMMMEM_IMPLICIT_POOL"] = "0"
    mine = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
    handle = symmetric_memory.rendezvous(mine, group.group_name)
    addresses = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
    return PeerMemory(mine, addresses, handle)


def wait_for_all(group: ProcessGroup, device: torch.device) -> None:
    """Return when every rank's work so far is done. Collective over the group."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier(group)
