"""Run a function on several ranks: processes that meet over a file (no ports), a timeout, the first failing rank's traceback."""

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Children fork from a clean server that has imported the heavy modules once: a rank starts in milliseconds.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "transformers", "dcpmla", "dcpmla.integrations.transformers", "numpy"])


def run_ranks(num_ranks: int, function: Callable[..., Any], *args: Any, device: str = "cpu", timeout: float = 120) -> list[Any]:
    """Call function(*args) on every rank of a fresh job, torch.distributed initialised; return the ranks' (picklable) results in order.

    Raises:
        AssertionError: a rank failed, with the traceback of the first that did; or time ran out, naming the ranks that were not done.
    """
    with tempfile.TemporaryDirectory() as directory:
        pipes, processes = [], []
        for rank in range(num_ranks):
            receiver, sender = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(
                target=_run, args=(sender, rank, num_ranks, Path(directory) / "store", device, timeout, function, args), daemon=True
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            return _collect(pipes, timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: list[Connection], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    while len(results) < len(pipes):
        missing = [rank for rank in range(len(pipes)) if rank not in results]
        ready = wait([pipes[rank] for rank in missing], timeout=max(0.0, deadline - time.monotonic()))
        assert ready, f"ranks {missing} of {len(pipes)} were not done after {timeout} s"
        for rank in missing:
            if pipes[rank] in ready:
                try:
                    results[rank], error = pickle.loads(pipes[rank].recv_bytes())
                except EOFError:
                    error = "the process ended without a word"
                assert error is None, f"rank {rank} of {len(pipes)} failed:\n{error}"
    return [results[rank] for rank in range(len(pipes))]


def _run(
    sender: Connection,
    rank: int,
    num_ranks: int,
    store: Path,
    device: str,
    timeout: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills torch.empty with NaN: a row that nobody wrote shows
    try:
        if device == "cuda":
            torch.cuda.set_device(rank)
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            store=dist.FileStore(str(store), num_ranks),
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout),
            device_id=torch.device("cuda", rank) if device == "cuda" else None,
        )
        result = function(*args)
        dist.barrier()
        dist.destroy_process_group()
        outcome = result, None
    except BaseException:
        outcome = None, traceback.format_exc()
    # Plain pickle: the pipe's own would hand tensors over as shared memory of a process that is about to end.
    sender.send_bytes(pickle.dumps(outcome))
