"""Sums over a TP group: collectives on CPUs, the kernels of `direct` in Triton's interpreter, what is refused."""

import random
import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dcpmla.comm.reduce import CollectiveReduce, Reduce, select_reduce
from dcpmla.parallel.collectives import PeerFault
from tests.support.ranks import run_ranks
from tests.support.shared_memory import allocate, delay_kernels, run_interpreted

pytest.importorskip("triton")

from dcpmla.comm import direct_ops, direct_reduce  # noqa: E402
from tests.support.reduce_checks import check_memory, check_sums  # noqa: E402

CPU = torch.device("cpu")


def check_collective() -> None:
    reduce = select_reduce(dist.group.WORLD, CPU)
    assert isinstance(reduce, CollectiveReduce)
    for seed, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32, torch.float64)):
        check_sums(reduce, (3, 24), dtype, seed, CPU, is_odd=dtype == torch.bfloat16)
    check_sums(reduce, (0, 8), torch.float32, 0, CPU)
    refuse(reduce)
    reduce.check()


def refuse(reduce: Reduce) -> None:
    partial, weight = torch.zeros(3, 8), torch.ones(8)
    for residual, given in ((partial[:2], weight), (partial.double(), weight), (partial, weight[:4])):
        with pytest.raises(ValueError, match=r"residual is .* expected \[T, N\] as partial|weight has shape \(4,\)"):
            reduce.add_norm(partial, residual, given, 1e-6)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_collective(num_ranks: int) -> None:
    run_ranks(num_ranks, check_collective)


def new_reduce(**changes: Any) -> direct_reduce.DirectReduce:
    return direct_reduce.DirectReduce(**{"group": dist.group.WORLD, "device": CPU, "allocate": allocate, **changes})


def shrink(num_programs: int) -> None:
    """Let a launch have a few programs, of several items each.

    The interpreter runs programs one after the other: each must hold whole rows, as they await each other's squares.
    """
    direct_ops.NUM_PROGRAMS = direct_reduce.NUM_PROGRAMS = num_programs
    direct_reduce._NARROW_ELEMENTS, direct_reduce._WIDE_ELEMENTS = 300, 600


def check_direct(num_steps: int) -> None:
    """Check sums in one trip and in two, of rows of one item each and of several, in one turn and in several."""
    delay_kernels(random.Random(dist.get_rank()))
    common, size = random.Random(7), dist.get_world_size()
    for num_programs, widths in ((4, (8, 64)), (1, (136, 264))):
        shrink(num_programs)
        reduce = new_reduce(landing_bytes=1 << 13)
        reduce._memory[1][:-1] = 2**31 - 3  # the exchange numbers pass 32 bits
        for step in range(num_steps):
            direct_reduce._ONE_SHOT_BYTES = (1 << 20, 0)[step % 2]
            dtype = (torch.float16, torch.float32)[step // 2]
            shape = common.randint(1, 3 + 6 * (step == 1)), common.choice(widths)
            check_sums(reduce, shape, dtype, step, CPU, is_odd=step == 2)
        assert reduce.all_reduce(torch.zeros(0, 8)).shape == (0, 8)
        check_memory(reduce)
    refuse(reduce)
    with pytest.raises(ValueError, match=f"landing_bytes is 256; {size} ranks' rows of 512 columns take more"):
        new_reduce(landing_bytes=256).all_reduce(torch.zeros(1, 512))
    with pytest.raises(ValueError, match="partial has dtype torch.float64; direct carries"):
        reduce.all_reduce(torch.zeros(1, 8, dtype=torch.float64))


@pytest.mark.parametrize(("num_ranks", "num_steps"), [(2, 4), (3, 4), (4, 2)])
def test_direct(num_ranks: int, num_steps: int) -> None:
    run_interpreted(num_ranks, check_direct, num_steps)


def check_missing_rank() -> None:
    """Leave rank 1 of three out: the others wait for it once, and report it."""
    rank = dist.get_rank()
    delay_kernels(random.Random(rank))
    shrink(2)
    check_sums(new_reduce(), (1, 8), torch.float32, 0, CPU)  # the first call is slow
    rows, weight = torch.zeros(4, 8), torch.ones(8)
    for operation, one_shot_bytes in (("all_reduce", 1 << 20), ("add_norm", 1 << 20), ("add_norm", 0)):
        direct_reduce._ONE_SHOT_BYTES = one_shot_bytes
        reduce = new_reduce(timeout=2.0)
        if rank == 1:
            continue
        for most_seconds in (6.0, 2.0):
            start = time.monotonic()
            _ = reduce.all_reduce(rows) if operation == "all_reduce" else reduce.add_norm(rows, rows, weight, 1e-6)
            assert time.monotonic() - start < most_seconds
            words = f"{operation} failed on rank {rank} of the group [0, 1, 2]: nothing came from rank 1 for 2 s"
            if most_seconds > 2:
                with pytest.raises(PeerFault, match=re.escape(words)):
                    reduce.check()
                with pytest.raises(PeerFault, match=re.escape(words)):
                    reduce.all_reduce(rows)
            reduce._fault.zero_()  # so that kernels run as they do in graphs


def test_missing_rank() -> None:
    run_interpreted(3, check_missing_rank)
