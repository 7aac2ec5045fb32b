"""Collectives whose failures say which rank failed in which operation."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

# torch 2.13 renamed the collectives over one tensor, and warns about the only names that 2.11 has.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# gloo raises plain RuntimeErrors; its source path or its wording tells them from others.
_GLOO = re.compile(r"gloo|pair closure|connection (closed|reset)|broken pipe", re.IGNORECASE)


class PeerFault(RuntimeError):
    """Another rank's fault: it failed and reports so itself, or it did not come: it is gone, stopped or stuck."""


@contextmanager
def named(operation: str, group: ProcessGroup) -> Iterator[None]:
    """Add a note to a failed or timed-out collective: the operation, this rank and its group.

    NCCL's own watchdog reports timeouts, with rank and operation, before it ends the process.
    """
    try:
        yield
    except RuntimeError as error:
        ranks = dist.get_process_group_ranks(group)
        error.add_note(
            f"{operation} failed on rank {dist.get_rank()} of the group {ranks}: another rank is missing, stuck or late"
        )
        raise


def all_gather(tensor: Tensor, group: ProcessGroup, operation: str) -> Tensor:
    """Gather a tensor [...] of each of W ranks: return [W, ...]. Collective over the group."""
    gathered = tensor.new_empty(dist.get_world_size(group), *tensor.shape)
    with named(operation, group):
        _all_gather(gathered.flatten(0, 1), tensor.contiguous(), group=group)
    return gathered


def is_failed_collective(error: BaseException) -> bool:
    """Tell whether ranks lost each other, which most often is the consequence of another rank's fault."""
    return isinstance(error, dist.DistError | PeerFault) or (
        isinstance(error, RuntimeError) and bool(_GLOO.search(str(error)))
    )


def name_ranks(ranks: Sequence[int]) -> str:
    """Name ranks as the subject of a sentence: "rank 1", "each of ranks 0, 2"."""
    shown = ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"each of ranks {shown}"
