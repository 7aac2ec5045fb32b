"""Shared memory between processes in place of GPUs' symmetric memory, for kernels in Triton's interpreter."""

import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dcpmla.comm.symmetric import PeerMemory
from tests.support.ranks import run_ranks


def allocate(num_bytes: int, group: ProcessGroup, device: torch.device) -> PeerMemory:
    """Map a file of each rank into all ranks. Collective over the group."""
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


def run_interpreted(num_ranks: int, function: Callable[..., Any], *args: Any) -> None:
    """Run `run_ranks` in a process of its own, because Triton decides to interpret when it is imported."""
    _interpreter().submit(partial(run_ranks, timeout=200), num_ranks, function, *args).result()


@cache
def _interpreter() -> ProcessPoolExecutor:
    """Start the one process for all jobs; its start, and that of its server of ranks, takes longer than some jobs."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _decide_to_interpret)


def _decide_to_interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"


def delay_kernels(delays: random.Random, chance: float = 0.03) -> None:
    """Replace the kernels' clock, inline assembler that the interpreter lacks, by one that is late now and then."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    from dcpmla.comm.kernels import exchange, items, landings, window

    def now() -> Any:
        time.sleep(0.02 * delays.random() if delays.random() < chance else 0.0005)  # the others need the core
        return tl.core.tensor(TensorHandle(np.array([time.monotonic_ns()]), tl.int64), tl.int64)

    landings.now = window.now = exchange.now = items.now = now
    np.seterr(all="ignore")  # shards without tokens hold anything


def send_rows(out: Tensor, lse: Tensor, landings: PeerMemory, state: Tensor, landing_bytes: int, rank: int) -> None:
    """Store rows [T, W h, D] at their owners, as attention does that sends them itself: the first half of `combine`."""
    number, size = state[:1] + 1, len(landings.addresses)
    landing, num_rows, width = int(number) % 2, lse.numel() // size, out.shape[-1]
    for owner, memory in enumerate(landings.owner):
        rows, lses = (mine.chunk(size, 1)[owner].flatten(0, 1) for mine in (out, lse))
        is_sent = lses != -torch.inf
        landed = memory[landing * landing_bytes :].view(out.dtype)
        targets = landed[rank * num_rows * width :][: num_rows * width].view(num_rows, width)
        targets[is_sent] = rows.where(~rows.isnan(), torch.nan)[is_sent]  # no kernel computes the NaN of all ones
        words = memory[2 * landing_bytes + landing * (landing_bytes // 8) :].view(torch.int64)
        words[rank * num_rows :][:num_rows].copy_((lses.view(torch.int32).long() & 0xFFFFFFFF) | (number.long() << 32))
