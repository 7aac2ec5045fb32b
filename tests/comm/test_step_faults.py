"""Faults of `direct` after a step: a late rank, and the error that all ranks raise."""

import random
import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from dcpmla.comm import direct_ops
from dcpmla.comm.direct import DirectExchange
from dcpmla.comm.exchange import LocalExchange
from dcpmla.comm.faults import StepFaults
from dcpmla.comm.nccl import AllToAll
from dcpmla.config import DCPConfig
from dcpmla.parallel.collectives import PeerFault
from tests.support.ranks import on_ranks
from tests.support.shared_memory import allocate, delay_kernels, run_interpreted

CPU = torch.device("cpu")
TIMEOUT, PATIENCE = 2.0, 150.0  # seconds


@on_ranks(4, run_interpreted)
def test_a_late_rank_is_known_to_all_ranks() -> None:
    """Run steps of two groups of two ranks over one TP group. In one step rank 2 comes after rank 3 has given up."""
    rank = dist.get_rank()
    delay_kernels(random.Random(rank))
    direct_ops.raise_fault = lambda *_: None  # A replay of a CUDA graph runs kernels alone.
    groups = [dist.new_group([first, first + 1]) for first in (0, 2)]
    exchange = DirectExchange(groups[rank // 2], CPU, landing_bytes=1 << 15, timeout=PATIENCE, allocate=allocate)
    dcp = DCPConfig(tensor_parallel_size=4, decode_context_parallel_size=2, exchange_timeout=TIMEOUT)
    faults = StepFaults(exchange, dcp, dist.group.WORLD, CPU)
    out, lse = torch.ones(1, 2, 8), torch.zeros(1, 2)

    def step(is_late: bool = False) -> tuple[torch.Tensor, Callable[[], None]]:
        """Run a layer: gather, merge, a sum over the TP group."""
        if is_late and rank == 2:
            dist.recv(torch.empty(1), 3)
        hidden = exchange.combine(out * exchange.gather_heads(out[:, :1]), lse)[0].sum()
        if is_late and rank == 3:
            dist.send(torch.ones(1), 2)
        dist.all_reduce(hidden)
        return hidden, faults.start()

    step()  # the first one is slow
    sound, check = step()
    check()
    if rank == 3:
        exchange._mailbox = exchange._mailbox._replace(timeout=TIMEOUT)
    hidden, check = step(is_late=True)
    words = r"^gather_heads failed on rank 3 of the group \[2, 3\]: nothing came from rank 2 for 2 s, in exchange 5$"
    assert not torch.equal(hidden, sound), "every rank has a wrong sum"
    if rank == 3:
        with pytest.raises(PeerFault, match=words):
            exchange.check()
    else:
        exchange.check()  # no word of its own, on the late rank either
    for _ in range(2):
        with pytest.raises(PeerFault, match=words):
            check()
        check = faults.start()  # a later step's


@on_ranks(2, run_interpreted)
def test_exchanges_without_words_share_nothing() -> None:
    """Let one rank alone start: that would wait for ever if it were collective."""
    rank = dist.get_rank()
    dcp = DCPConfig(tensor_parallel_size=2, decode_context_parallel_size=2)
    for exchange in (LocalExchange(), AllToAll(dist.group.WORLD)):
        faults = StepFaults(exchange, dcp, dist.group.WORLD, CPU)
        if rank == 0:
            faults.start()()


@on_ranks(4, run_interpreted)
def test_a_group_without_words_learns_of_others() -> None:
    """Share the words of one group with another, whose exchange is of collectives."""
    rank = dist.get_rank()
    groups = [dist.new_group([first, first + 1]) for first in (0, 2)]
    exchange = AllToAll(groups[rank // 2])
    if rank > 1:
        exchange.fault = torch.tensor([0 if rank == 2 else (7 << 32) | (1 << 8) | 2])
    dcp = DCPConfig(tensor_parallel_size=4, decode_context_parallel_size=2)
    words = "gather_context failed on rank 3 of the group [2, 3]: nothing came from rank 3 for 60 s, in exchange 7"
    with pytest.raises(PeerFault, match=re.escape(words)):
        StepFaults(exchange, dcp, dist.group.WORLD, CPU).start()()
