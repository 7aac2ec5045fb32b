"""Collectives that say who failed at what."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed import ProcessGroup


@contextmanager
def named(operation: str, group: ProcessGroup) -> Iterator[None]:
    """Around a collective: its failure or timeout names the operation, this rank and its group.

    (NCCL reports timeouts from its own watchdog, with rank and operation, before it ends the process.)
    """
    try:
        yield
    except RuntimeError as error:
        ranks = dist.get_process_group_ranks(group)
        error.add_note(f"{operation} failed on rank {dist.get_rank()} of the group {ranks}: another rank is missing, stuck or late")
        raise
