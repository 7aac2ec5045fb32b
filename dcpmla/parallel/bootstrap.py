"""Start-up and shutdown: environment of the launcher -> torch.distributed, one context manager."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class Ranks:
    """This process among the job's. `device` is where its tensors live."""

    rank: int
    num_ranks: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def read_launcher(device: str) -> Ranks:
    """What torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE) say; a single process without them.

    Args:
        device: "cuda" wants a GPU for each rank of this host; "auto" takes GPUs if there are that many, else CPUs for all.
    Raises:
        ValueError: an unknown device, or "cuda" with too few GPUs.
    """
    if device not in DEVICES:
        raise ValueError(f"device (--device) is {device!r}; choose one of {', '.join(DEVICES)}")
    rank, num_ranks, local_rank, num_local = (
        int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1))
    )
    num_gpus = torch.cuda.device_count()
    if device == "cuda" and num_gpus < num_local:
        raise ValueError(
            f"device (--device) is 'cuda', but this host has {num_gpus} GPUs for {num_local} ranks; start fewer, or use --device cpu"
        )
    if device == "cpu" or num_gpus < num_local:
        # transformers puts a tensor-parallel model on the accelerator that it sees: now it must see none.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return Ranks(rank, num_ranks, torch.device("cpu"))
    return Ranks(rank, num_ranks, torch.device("cuda", local_rank))


@contextmanager
def distributed(ranks: Ranks, timeout: timedelta) -> Iterator[None]:
    """Initialise torch.distributed for the block, NCCL on GPUs and gloo on CPU, and shut it down after it.

    A ValueError is every rank's (see `agree`), so the groups are shut down for it too; after any other exception the peers may be gone and
    waiting for them would hang, so the groups are left to the end of the process.
    """
    on_gpu = ranks.device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(ranks.device)
    # Without a launcher there is nobody to meet: an in-process store serves the group of one.
    store = None if "WORLD_SIZE" in os.environ else dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=ranks.rank,
        world_size=ranks.num_ranks,
        timeout=timeout,
        device_id=ranks.device if on_gpu else None,
    )
    try:
        yield
    except ValueError:
        dist.destroy_process_group()
        raise
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def agree() -> Iterator[None]:
    """Run a block that any rank's ValueError may end: then every rank raises the ValueError of the first rank that has one.

    Collective. A mistake that only some ranks can see (a file, a shard of a checkpoint) so ends the whole job with one message, not a hang.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # also what is no user's mistake: the other ranks wait below
        error = caught
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, None if error is None else str(error) or repr(error))
    if error is not None and not isinstance(error, ValueError):
        raise error
    message = next((message for message in messages if message), None)
    if message:
        raise ValueError(message) from error
