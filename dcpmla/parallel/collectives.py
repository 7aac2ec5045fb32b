"""Collectives that say who failed at what."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed import ProcessGroup

# gloo raises plain RuntimeErrors: its source path, or its words, tell them from others.
_GLOO = re.compile(r"gloo|pair closure|connection (closed|reset)|broken pipe", re.IGNORECASE)


class PeerFault(RuntimeError):
    """Another rank has failed, and says why itself; or it did not come, and may be silent about that: it is gone,
    stopped or stuck.
    """


@contextmanager
def named(operation: str, group: ProcessGroup) -> Iterator[None]:
    """Around a collective: its failure or timeout names the operation, this rank and its group.

    (NCCL reports timeouts from its own watchdog, with rank and operation, before it ends the process.)
    """
    try:
        yield
    except RuntimeError as error:
        ranks = dist.get_process_group_ranks(group)
        error.add_note(
            f"{operation} failed on rank {dist.get_rank()} of the group {ranks}: another rank is missing, stuck or late"
        )
        raise


def is_failed_collective(error: BaseException) -> bool:
    """Whether an error says that ranks lost each other, which most often is the consequence of another rank's fault."""
    return isinstance(error, dist.DistError | PeerFault) or (
        isinstance(error, RuntimeError) and bool(_GLOO.search(str(error)))
    )


def name_ranks(ranks: Sequence[int]) -> str:
    """Before a verb: "rank 1", "each of ranks 0, 2"."""
    shown = ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"each of ranks {shown}"
