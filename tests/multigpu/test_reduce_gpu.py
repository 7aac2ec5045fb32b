"""Sums over a TP group on GPUs: the norm's kernel alone, NCCL, and `direct` with its sizes, graphs and faults."""

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dcpmla.comm import direct_reduce
from dcpmla.comm.calls import NormedSum
from dcpmla.comm.direct_reduce import DirectReduce
from dcpmla.comm.norm import add_norm, norm_rows
from dcpmla.comm.reduce import CollectiveReduce, select_reduce
from dcpmla.comm.terms import Terms
from dcpmla.parallel.collectives import PeerFault
from dcpmla.parallel.fp8 import quantize_rows
from tests.support.direct_checks import assert_same_bits, check_replays, seconds_on_gpu
from tests.support.gpus import on_gpus
from tests.support.ranks import run_ranks
from tests.support.reduce_checks import EPS, assert_normed, check_memory, check_quantized, check_sums, check_terms, draw


def here() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_kernel_alone(dtype: torch.dtype) -> None:
    """It rounds where torch's operations round."""
    for num_tokens, width in itertools.product((0, 1, 300), (64, 1000, 7168, 16384)):
        partial, residual = torch.randn(2, num_tokens, width, device="cuda").to(dtype)
        weight = torch.randn(width, device="cuda").to(dtype)
        normed, new_residual, *_ = add_norm(NormedSum(Terms(partial), residual, weight, EPS))
        if width % 128 == 0:
            *others, scales = add_norm(NormedSum(Terms(partial), residual, weight, EPS, True))
            wanted = quantize_rows(normed)
            assert_same_bits((*others,), (normed, new_residual, wanted.values))
            assert torch.equal(scales, wanted.scales)
        assert torch.equal(new_residual, (residual.float() + partial.float()).to(dtype))
        assert_normed(normed, new_residual, weight)


def check_sizes() -> None:
    """Sum rows of models' widths, in one trip, in two, and as it is chosen, also past a landing."""
    reduce, choose = select_reduce(dist.group.WORLD, here()), direct_reduce.is_one_shot
    assert isinstance(reduce, DirectReduce)
    for seed, (is_one_shot, num_tokens, width) in enumerate(
        itertools.product((True, False, None), (0, 1, 2, 7, 33, 256, 700), (2048, 7168, 1416))
    ):
        direct_reduce.is_one_shot = choose if is_one_shot is None else lambda *_: is_one_shot  # noqa: B023
        check_sums(reduce, (num_tokens, width), torch.bfloat16, seed, here(), is_odd=num_tokens == 7)
        check_terms(reduce, (num_tokens, width), torch.bfloat16, seed, here())
        if num_tokens == 33:
            for dtype in (torch.float16, torch.float32):
                check_sums(reduce, (num_tokens, width), dtype, seed, here(), is_odd=True)
        if width != 1416:
            check_quantized(reduce, (num_tokens, width), torch.bfloat16, here())
    direct_reduce.is_one_shot = choose
    check_sums(reduce, (8192, 4096), torch.bfloat16, 0, here())
    check_terms(reduce, (8192, 7168), torch.bfloat16, 0, here())
    check_memory(reduce)
    check_sums(CollectiveReduce(dist.group.WORLD), (33, 7168), torch.float32, 0, here())


def check_order() -> None:
    """Sum in rank order: rows have the same bits in one trip, in two, by NCCL, and in steps of 1 to 700 rows."""
    direct = DirectReduce(dist.group.WORLD, here(), is_deterministic=True)
    collective = CollectiveReduce(dist.group.WORLD, is_deterministic=True)
    rank, choose = dist.get_rank(), direct_reduce.is_one_shot
    for width in (2048, 7168):
        partials, residual, weight = draw(700, width, torch.bfloat16, 0, here())
        total = torch.zeros(700, width, device="cuda")
        for one in partials:
            total = total + one
        new_residual = (total + residual.float()).bfloat16()
        normed = norm_rows(new_residual, weight, EPS, False)[0]
        for reduce, is_one_shot in ((direct, True), (direct, False), (direct, None), (collective, None)):
            direct_reduce.is_one_shot = choose if is_one_shot is None else lambda *_: is_one_shot  # noqa: B023
            for rows in (slice(1), slice(4, 6), slice(3, 40), slice(700)):
                part = partials[rank, rows].clone()
                assert torch.equal(reduce.all_reduce(part.clone()), total[rows].bfloat16())
                assert_same_bits(reduce.add_norm(part, residual[rows], weight, EPS), (normed[rows], new_residual[rows]))
    direct_reduce.is_one_shot = choose
    check_quantized(direct, (5, 7168), torch.bfloat16, here())
    check_memory(direct)


def check_graphs() -> None:
    """Mix replays with eager calls before and after them, an odd number of sums apart."""
    reduce, rank = DirectReduce(dist.group.WORLD, here()), dist.get_rank()
    direct_reduce._ONE_SHOT_BYTES = 100_000

    def run(held: list[tuple[Tensor, ...]]) -> list[Tensor]:
        results = [result for inputs in held for result in reduce.add_norm(*inputs, EPS)]
        return [*results, reduce.all_reduce(held[0][0])]

    def draw_own(seed: int) -> list[tuple[Tensor, ...]]:
        drawn = [draw(num_tokens, 7168, torch.bfloat16, seed, here()) for num_tokens in (1, 40, 256)]
        return [(partials[rank], residual, weight) for partials, residual, weight in drawn]

    rows = [partial for partial, *_ in draw_own(0)]
    check_replays(run, draw_own, lambda seed: reduce.all_reduce(rows[seed % 2]))
    check_memory(reduce)


def check_missing_rank() -> None:
    """Leave the last rank out: the others report it once, also in a graph, and have a working GPU."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rows, weight = torch.ones(4, 7168, dtype=torch.bfloat16, device="cuda"), torch.ones(7168, device="cuda")
    reduce = DirectReduce(dist.group.WORLD, here(), timeout=3.0)
    reduce.add_norm(rows, rows, weight, EPS)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        reduce.add_norm(rows, rows, weight, EPS)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == size - 1:
        return
    assert 3.0 <= seconds_on_gpu(graph.replay) < 10.0
    for again in (reduce.check, lambda: reduce.all_reduce(rows)):
        with pytest.raises(PeerFault, match=f"add_norm failed on rank {rank} .* from rank {size - 1} for 3 s"):
            again()
    assert seconds_on_gpu(graph.replay) < 1.0
    assert torch.ones(3, device="cuda").sum() == 3


@on_gpus(2, 3, 4, 8)
@pytest.mark.parametrize("check", [check_sizes, check_order, check_graphs, check_missing_rank])
def test_sums(check: Callable[[], None], num_gpus: int) -> None:
    run_ranks(num_gpus, check, device="cuda")
