"""Faults of `direct` after a step in a CUDA graph, over NVLink: a late rank, and the error that all ranks raise."""

import pytest
import torch
import torch.distributed as dist

from dcpmla.comm.faults import StepFaults
from dcpmla.config import DCPConfig
from dcpmla.parallel.collectives import PeerFault
from tests.support.direct_checks import SHAPES, draw_own, exchange_all, exchange_on_gpu
from tests.support.gpus import on_gpus
from tests.support.ranks import run_ranks

TIMEOUT, LATE_CYCLES = 1.0, 8_000_000_000  # seconds; cycles, four seconds or more


def check_late_rank() -> None:
    """Replay a step whose rank 0 is late. Nothing is called on the host between the launch and the check."""
    exchange, rank, size = exchange_on_gpu(timeout=TIMEOUT), dist.get_rank(), dist.get_world_size()
    dcp = DCPConfig(tensor_parallel_size=size, decode_context_parallel_size=size, exchange_timeout=TIMEOUT)
    faults = StepFaults(exchange, dcp, dist.group.WORLD, exchange.device)
    inputs = draw_own(exchange, SHAPES[0], 0)
    exchange_all(exchange, *inputs)
    faults.start()()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        exchange_all(exchange, *inputs)
    total = torch.zeros(1, device="cuda")
    for is_late in (False, True):
        if is_late and rank == 0:
            torch.cuda._sleep(LATE_CYCLES)
        graph.replay()
        dist.all_reduce(total)  # A layer's sum over the TP group.
        check = faults.start()
        if not is_late:
            check()
    words = rf"^gather_heads failed on rank [1-9] of the group .*: nothing came from rank 0 for {TIMEOUT:g} s, "
    with pytest.raises(PeerFault, match=words):
        check()
    if rank == 0:
        exchange.check()  # the late rank has no word of its own


@on_gpus(2, 4)
def test_a_late_rank_is_known_to_all_ranks(num_gpus: int) -> None:
    run_ranks(num_gpus, check_late_rank, device="cuda")
