"""Memory that ranks on one machine share, in place of GPUs' symmetric memory; and jobs of ranks that run kernels in Triton's interpreter."""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from dcpmla.comm.symmetric import PeerMemory


def allocate(num_bytes: int, group: ProcessGroup, device: torch.device) -> PeerMemory:
    """A file of each rank, mapped by all. Collective over the group."""
    paths = [""] * dist.get_world_size(group)
    handle, path = tempfile.mkstemp(dir="/dev/shm")
    os.truncate(handle, num_bytes)
    os.close(handle)
    dist.all_gather_object(paths, path, group=group)
    mapped = [torch.from_file(each, shared=True, size=num_bytes, dtype=torch.uint8) for each in paths]
    dist.barrier(group)
    Path(path).unlink()
    addresses = torch.tensor([memory.data_ptr() for memory in mapped])
    return PeerMemory(mapped[dist.get_rank(group)], addresses, mapped)
