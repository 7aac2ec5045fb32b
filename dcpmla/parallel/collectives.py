"""Collectives whose failures name the rank and the operation. Values are sent as JSON: unpickling could run code."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

# torch 2.13 renamed the collectives over one tensor, and warns about the only names that 2.11 has.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# gloo raises plain RuntimeErrors; its source path or its wording identifies them.
_GLOO = re.compile(r"gloo|pair closure|connection (closed|reset)|broken pipe", re.IGNORECASE)


class PeerFault(RuntimeError):
    """Another rank's fault: it failed and reports an error itself, or it is gone, stopped or stuck."""


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


def gather_values(value: Any, group: ProcessGroup | None, operation: str) -> list[Any]:
    """Gather a JSON value of each rank, in rank order; tuples become lists. Collective over the group, by default all.

    The host waits for the other ranks and the device.
    """
    group = group or dist.group.WORLD
    assert group is not None
    packed = _pack(value, group)
    lengths = all_gather(torch.tensor([len(packed)], device=packed.device), group, operation).flatten().tolist()
    padded = packed.new_zeros(max(lengths))
    padded[: len(packed)] = packed
    rows = all_gather(padded, group, operation).cpu()
    return [_unpack(row[:length]) for row, length in zip(rows, lengths, strict=True)]


def broadcast_value(value: Any, group: ProcessGroup | None, operation: str) -> Any:
    """Return the JSON value of the group's first rank; other values are ignored. Collective as `gather_values`."""
    group = group or dist.group.WORLD
    assert group is not None
    packed = _pack(value if dist.get_rank(group) == 0 else None, group)
    length = torch.tensor([len(packed)], device=packed.device)
    with named(operation, group):
        dist.broadcast(length, group=group, group_src=0)
        packed = packed if dist.get_rank(group) == 0 else packed.new_empty(int(length))
        dist.broadcast(packed, group=group, group_src=0)
    return _unpack(packed.cpu())


def _pack(value: Any, group: ProcessGroup) -> Tensor:
    """Return a value's JSON, uint8, on the device of the group's collectives."""
    device = "cpu" if dist.get_backend(group) == "gloo" else torch.device("cuda", torch.cuda.current_device())
    return torch.from_numpy(np.frombuffer(json.dumps(value).encode(), dtype=np.uint8).copy()).to(device)


def _unpack(packed: Tensor) -> Any:
    return json.loads(packed.numpy().tobytes())


def is_failed_collective(error: BaseException) -> bool:
    """Return whether an error is a lost connection between ranks, mostly the consequence of another rank's fault."""
    return isinstance(error, dist.DistError | PeerFault) or (
        isinstance(error, RuntimeError) and bool(_GLOO.search(str(error)))
    )


def name_ranks(ranks: Sequence[int]) -> str:
    """Name ranks as the subject of a sentence: "rank 1", "each of ranks 0, 2"."""
    shown = ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"each of ranks {shown}"
