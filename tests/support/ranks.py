"""Run a function on several ranks: processes that meet over a file (no ports), a timeout, the first failing rank's
traceback.
"""

import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial, wraps
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dcpmla.runtime.capture import GraphSet
from dcpmla.runtime.engine import Engine

# Children fork from a clean server that has imported the heavy modules once: a rank starts in milliseconds. PyTorch
# imports the compiler at the first custom operator, which takes a rank seconds. Triton's interpreter is chosen at
# import: its ranks have a server of their own.
_CLI = [f"dcpmla.cli.{command}" for command in ("bench", "doctor", "generate", "plan", "serve")]
_CLI += [f"dcpmla.bench.{name}" for name in ("exchange", "generate", "layer", "sparse")]
_CLI += ["dcpmla.serving.http", "dcpmla.serving.loop"]
_MODELS = ["transformers.conversion_mapping", "transformers.models.deepseek_v3.modeling_deepseek_v3"]
_CONTEXT = multiprocessing.get_context("forkserver")
_LAST = ["tests.support.preloaded"]
_CONTEXT.set_forkserver_preload(["torch", "torch._dynamo", "torch.testing", "pytest", *_CLI, *_MODELS, *_LAST])


def start_process(target: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Start a process that runs target(*args); whoever starts it also kills and joins it.

    multiprocessing looks after all its children whenever any thread starts another, and an exit status can be read
    once: of two threads that ask for it at the same time, one is told 255. So it gets to know of these children no more
    than their start.
    """
    test = os.environ.get("PYTEST_CURRENT_TEST", "")  # The server has the variables of when it started.
    process = _CONTEXT.Process(target=_begin, args=(test, target, args), daemon=True)
    process.start()
    multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]
    return process


def _begin(test: str, target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ["PYTEST_CURRENT_TEST"] = test
    target(*args)


def run_ranks(
    num_ranks: int, function: Callable[..., Any], *args: Any, device: str = "cpu", timeout: float | None = None
) -> list[Any]:
    """Call function(*args) on every rank of a fresh job, torch.distributed initialized; return the ranks'
    (picklable) results in order.

    The default of `timeout` is 120 seconds on CPUs and 500 on GPUs, because ranks compile their kernels first.

    Raises:
        AssertionError: a rank failed, with the traceback of the first that did, or kept a graph; a signal ended one,
            with its name; or time ran out, with the ranks that were not done.
    """
    timeout = timeout or (120 if device == "cpu" else 500)
    with tempfile.TemporaryDirectory() as directory:
        pipes, processes = [], []
        for rank in range(num_ranks):
            receiver, sender = _CONTEXT.Pipe(duplex=False)
            store = Path(directory) / "store"
            processes.append(start_process(_run, (sender, rank, num_ranks, store, device, timeout, function, args)))
            sender.close()
            pipes.append(receiver)
        try:
            return _collect(pipes, processes, timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()


def on_ranks(num_ranks: int, run: Callable[..., Any] = run_ranks, **options: Any) -> Any:
    """Have the body of a test run on every rank of a fresh job (`run`), with the test's parameters."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @wraps(body)
        def test(**arguments: Any) -> None:
            run(num_ranks, partial(body, **arguments), **options)

        body.__qualname__ = f"body_of_{body.__name__}"  # Ranks look the body up by this name.
        setattr(sys.modules[body.__module__], body.__qualname__, body)
        return test

    return decorate


def message_of(function: Callable[..., Any], *args: Any) -> str:
    """On a rank: return the message of the ValueError that function(*args) raises."""
    try:
        function(*args)
    except ValueError as error:
        return str(error)
    return "no error"


def _collect(pipes: list[Connection], processes: list[Any], timeout: float) -> list[Any]:
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
                    processes[rank].join(10)
                    raise AssertionError(f"rank {rank} of {len(pipes)} {_ending(processes[rank])}") from None
                assert error is None, f"{_crashes(processes)}rank {rank} of {len(pipes)} failed:\n{error}"
    return [results[rank] for rank in range(len(pipes))]


def _crashes(processes: list[Any], grace_seconds: float = 5) -> str:
    """Name the ranks that signals ended. A rank's closed connections fail its peers before its end is on record (a core
    is written first), so one that is ending is waited for.
    """
    deadline = time.monotonic() + grace_seconds
    while not any(map(_crashed, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return "".join(f"rank {rank} {_ending(process)}; " for rank, process in enumerate(processes) if _crashed(process))


def _crashed(process: Any) -> bool:
    return (process.exitcode or 0) < 0


def _ending(process: Any) -> str:
    if _crashed(process):
        return f"was ended by {signal.Signals(-process.exitcode).name}"
    return f"ended without a result, exit code {process.exitcode}"


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
    faulthandler.enable()  # a crash in native code shows where Python was
    torch.manual_seed(rank)  # else a rank draws numbers that no second run repeats
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
        _check_released()
        _check_compiled()
        dist.barrier()
        dist.destroy_process_group()
        outcome = result, None
    except BaseException:
        outcome = None, traceback.format_exc()
    # Plain pickle: the pipe's own would hand tensors over as shared memory of a process that is about to end.
    sender.send_bytes(pickle.dumps(outcome))


def _check_compiled() -> None:
    """Raise AssertionError if an engine has compiled kernels after its warm-up."""
    # Objects from before the fork are frozen, and not among these.
    names = [name for each in gc.get_objects() if type(each) is Engine for name in each.compilations]
    assert not names, f"kernels were compiled after the warm-up: {names}"


def _check_released() -> None:
    """Raise AssertionError if a graph is left, recorded or of a GPU: NCCL's groups of several ranks end after the last
    graph that holds their operations, so the job would wait for ever.
    """
    # Objects from before the fork are frozen, and not among these.
    num_left = sum(type(each) is GraphSet and each.is_captured for each in gc.get_objects())
    assert not num_left, f"{num_left} graphs are not released (Engine.close, StepGraph.release)"
