"""The exchange `direct` over NVLink: batch sizes, layouts, fp8, graphs, torch.compile, a rank that does not come."""

import itertools
import random
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dcpmla.merge import merge_partials
from dcpmla.parallel.collectives import PeerFault
from tests.support.direct_checks import (
    SHAPES,
    check_memory,
    check_replays,
    draw,
    draw_own,
    exchange_all,
    exchange_candidates,
    exchange_contexts,
    exchange_on_gpu,
    exchange_once,
    own_heads,
    seconds_on_gpu,
)
from tests.support.gpus import on_gpus
from tests.support.ranks import run_ranks


def check_sizes(dtype: torch.dtype) -> None:
    """Exchange batches of all sizes in bfloat16, and of a few in the other dtypes, which have to compile."""
    exchange, own = exchange_on_gpu(), random.Random(dist.get_rank())
    all_tokens, some_tokens = (1, 2, 3, 8, 33, 64, 100, 256, 700), (1, 33, 256)
    cases = [*itertools.product(all_tokens if dtype == torch.bfloat16 else some_tokens, (64, 128), (512,))]
    cases += itertools.product(some_tokens, (128,), (576, 128, 8, 40) if dtype == torch.bfloat16 else (40,))
    for num_tokens, num_heads, width in cases:
        exchange_once(exchange, (num_tokens, num_heads // exchange.size, width), dtype, num_tokens, own, num_layouts=1)
    check_memory(exchange)


@on_gpus(2, 3, 4, 8)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_sizes(num_gpus: int, dtype: torch.dtype) -> None:
    run_ranks(num_gpus, check_sizes, dtype, device="cuda")


def check_layouts() -> None:
    """Exchange tensors that each rank lays out differently, in bfloat16 and in fp8, with contexts in between."""
    exchanges, own, common = (
        [exchange_on_gpu(), exchange_on_gpu(is_fp8=True)],
        random.Random(dist.get_rank()),
        random.Random(0),
    )
    for seed in range(12):
        exchange_once(exchanges[seed % 2], ((3, 2, 72), (5, 3, 40))[seed // 6], torch.bfloat16, seed, own)
        exchange_contexts(exchanges[0], 3, common, own)
    for exchange in exchanges:
        exchange_candidates(exchange)
        check_memory(exchange)


def check_fp8() -> None:
    """Check that e4m3 rows are off by less than 2^-4 of a row's largest value (half a unit of 3 bits); NaN stays."""
    exact, exchange = exchange_on_gpu(), exchange_on_gpu(is_fp8=True)
    for seed, (shape, dtype) in enumerate(
        itertools.product((*SHAPES, (256, 16, 128)), (torch.bfloat16, torch.float32))
    ):
        (q, out, lse), heads = draw(exact, shape, dtype, seed), own_heads(exchange, shape)
        gathered, (merged, merged_lse) = (
            exchange.gather_heads(q[:, heads]),
            exchange.combine(out[dist.get_rank()], lse[dist.get_rank()]),
        )
        assert_near(
            gathered,
            q,
            q.view(shape[0], exchange.size, -1).nan_to_num(0.0).abs().amax(-1).repeat_interleave(shape[1], 1),
        )
        wanted, wanted_lse = merge_partials(out.double(), lse.double())
        assert_near(merged, wanted[:, heads], out.nan_to_num(0.0).abs().amax((0, 3))[:, heads])
        torch.testing.assert_close(merged_lse, wanted_lse[:, heads].float(), atol=1e-5, rtol=1e-6)
    check_memory(exchange)


def assert_near(got: Tensor, wanted: Tensor, largest: Tensor) -> None:
    assert torch.equal(got.isnan(), wanted.isnan())
    assert ((got.double() - wanted.double()).nan_to_num(0.0).abs() <= 2**-4 * largest[..., None]).all()


def check_graphs() -> None:
    """Mix replays with eager calls before and after them, an odd number of exchanges apart."""
    exchange = exchange_on_gpu()

    def run(held: list[tuple[Tensor, ...]]) -> list[Tensor]:
        return [result for inputs in held for result in exchange_all(exchange, *inputs)]

    def draw_inputs(seed: int) -> list[tuple[Tensor, ...]]:
        return [draw_own(exchange, shape, seed) for shape in SHAPES]

    queries = [q for q, *_ in draw_inputs(0)]
    check_replays(run, draw_inputs, lambda seed: exchange.gather_heads(queries[seed - 1]))
    check_memory(exchange)


def check_compiled() -> None:
    """Compile exchanges of few tokens and of many, whose queries, uncompiled, are stored straight into the result."""
    exchange = exchange_on_gpu()

    def attend(q: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        return exchange.combine(2 * exchange.gather_heads(q + 1), lse)

    compiled = torch.compile(attend, fullgraph=True)
    for num_tokens in (3, 5, 512):
        q, _, lse = draw_own(exchange, (num_tokens, 64 // exchange.size, 512), num_tokens)
        for got, wanted in zip(compiled(q, lse), attend(q, lse), strict=True):
            torch.testing.assert_close(got, wanted, equal_nan=True)
    check_memory(exchange)


def check_missing_rank() -> None:
    """Leave the last rank out: the others report it, have a working GPU, and go on among themselves."""
    rank, size, own = dist.get_rank(), dist.get_world_size(), random.Random(0)
    rest = dist.new_group(list(range(size - 1)))
    q = torch.ones(4, 8, 128, dtype=torch.bfloat16, device="cuda")
    patient, exchange = exchange_on_gpu(), exchange_on_gpu(timeout=3.0)
    patient.gather_heads(q)  # compiles, also for the other exchange: its 3 s are an int64 of nanoseconds, too
    torch.cuda.synchronize()
    exchange.gather_heads(q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        exchange.gather_heads(q)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == size - 1:
        return
    assert 3.0 <= seconds_on_gpu(lambda: exchange.gather_heads(q)) < 10.0
    for again in (exchange.check, lambda: exchange.gather_heads(q)):
        with pytest.raises(
            PeerFault, match=f"gather_heads failed on rank {rank} .* from rank {size - 1} for 3 s, in exchange 2$"
        ):
            again()
    assert seconds_on_gpu(graph.replay) < 1.0
    assert torch.ones(3, device="cuda").sum() == 3
    if size > 2:
        other = exchange_on_gpu(group=rest)
        for seed in range(3):
            exchange_once(other, SHAPES[seed], torch.bfloat16, seed, own)
        check_memory(other)


@on_gpus(2, 3, 4, 8)
@pytest.mark.parametrize("check", [check_layouts, check_fp8, check_graphs, check_compiled, check_missing_rank])
def test_exchange(check: Callable[[], None], num_gpus: int) -> None:
    run_ranks(num_gpus, check, device="cuda")
