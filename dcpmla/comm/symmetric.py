"""GPU memory that all ranks of a group can write to."""

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
    """The same number of bytes on each rank of a group, accessible to all its ranks.

    Attributes:
        mine: This rank's memory [N] uint8.
        addresses: Start of each rank's memory in this rank's address space, [W] int64 on the device.
        owner: Object that must stay alive while the memory is used.
    """

    mine: Tensor
    addresses: Tensor
    owner: object


Allocate = Callable[[int, ProcessGroup, torch.device], PeerMemory]


def allocate(num_bytes: int, group: ProcessGroup, device: torch.device) -> PeerMemory:
    """Allocate torch's symmetric memory, over NVLink, one address for each rank. Collective over the group."""
    # Multicast stays off: a host's fabric may not support it, and if it does, one crash can disable it for all
    # processes.
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    # From torch 2.13 on a pool would reuse freed memory as if all ranks had already exchanged its handles.
    os.environ["TORCH_SYMMMEM_IMPLICIT_POOL"] = "0"
    mine = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
    handle = symmetric_memory.rendezvous(mine, group.group_name)
    addresses = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
    return PeerMemory(mine, addresses, handle)


def wait_for_all(group: ProcessGroup, device: torch.device) -> None:
    """Wait until every rank's work so far is done. Collective over the group."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier(group)
