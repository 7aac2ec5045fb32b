"""What `run_ranks` makes of ranks that end badly."""

import gc
import os
import signal

import pytest
import torch
import torch.distributed as dist

from dcpmla import init_mesh
from dcpmla.attention.step.metadata import StepBuilder
from dcpmla.runtime.graph import StepGraph
from tests.runtime.test_graph import DCP, MAX_MODEL_LEN, sums
from tests.support import recording
from tests.support.hash_model import new_cache
from tests.support.ranks import run_ranks


def end_one_by(signal_number: int, waits: bool) -> None:
    """End rank 1 by a signal, while the other one waits for it or goes on to the barrier at its end."""
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal_number)
    if waits:
        dist.barrier()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL])
def test_a_rank_that_a_signal_ended_is_a_failure(number: signal.Signals, waits: bool) -> None:
    with pytest.raises(AssertionError, match=rf"rank 1 (of 2 )?was ended by {number.name}"):
        run_ranks(2, end_one_by, int(number), waits)


def leave() -> None:
    os._exit(3)


def test_a_rank_that_leaves_without_a_result_is_a_failure() -> None:
    with pytest.raises(AssertionError, match="rank 0 of 1 ended without a result, exit code 3"):
        run_ranks(1, leave)


def keep_graph(is_released: bool) -> None:
    """Record a graph, and leave it to the garbage collector."""
    cache = new_cache(40)
    graph = StepGraph.decodes(sums, torch.tensor(0), cache, StepBuilder(DCP, 0), init_mesh(1, 1), 2, MAX_MODEL_LEN)
    recording.capture(graph)
    gc.disable()
    if is_released:
        graph.release()


def test_a_rank_that_keeps_a_graph_is_a_failure() -> None:
    """NCCL would wait for the graph's end, and only jobs of several GPUs would show it, by hanging."""
    run_ranks(1, keep_graph, True)
    with pytest.raises(AssertionError, match=r"1 graphs are not released \(Engine.close"):
        run_ranks(1, keep_graph, False)
