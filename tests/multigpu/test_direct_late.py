"""The exchange `direct` over NVLink with late ranks: a soak, two groups, two streams, contexts under other kernels."""

import itertools
import random
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.direct_checks import (
    SHAPES,
    Shape,
    assert_same_bits,
    check_memory,
    draw_own,
    exchange_all,
    exchange_on_gpu,
    exchange_once,
    own_heads,
    tokens_of_rows,
)
from tests.support.gpus import on_gpus
from tests.support.ranks import on_ranks, run_ranks


def linger(own: random.Random) -> None:
    """Delay this rank's GPU, its host or neither by some milliseconds."""
    if own.random() < 0.2:
        torch.cuda._sleep(own.randrange(8_000_000))  # cycles
    elif own.random() < 0.1:
        time.sleep(0.01 * own.random())


def check_late_ranks() -> None:
    """Exchange without waiting for the GPU in between, so that ranks get as far ahead of others as they can."""
    exchange, own = exchange_on_gpu(), random.Random(dist.get_rank())
    inputs = [draw_own(exchange, SHAPES[seed % 3], seed) for seed in range(9)]
    wanted = [exchange_all(exchange, *given) for given in inputs]  # compared with references in other tests
    outcomes = []
    for step in range(300):
        q, out, lse = inputs[step % 9]
        linger(own)
        gathered = exchange.gather_heads(q)
        linger(own)
        outcomes.append((gathered, *exchange.combine(out, lse)))
    for step, got in enumerate(outcomes):
        assert_same_bits(got, wanted[step % 9])
    check_memory(exchange)


class Soak:
    """Exchanges of numbers that follow from a step counted on the GPU, which checks them itself, so stale rows are
    wrong.
    """

    def __init__(self) -> None:
        self.exchange = exchange_on_gpu()
        self.rank, self.size = dist.get_rank(), self.exchange.size
        self.step, self.num_wrong = (torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(2))

    def exchange_once(self, shape: Shape) -> None:
        num_tokens, num_heads, _ = shape
        heads = own_heads(self.exchange, shape)
        q, out = self._numbers(1, shape)[0], self._numbers(self.size, shape)
        ranks = torch.arange(self.size, device="cuda")[:, None]
        is_here = (ranks + torch.arange(num_tokens, device="cuda") + self.step) % 3 != 0  # [W, T]; at least one rank
        lse = torch.zeros(out.shape[:-1], device="cuda").masked_fill(~is_here[..., None], -torch.inf)
        self._expect(self.exchange.gather_heads(q[:, heads]), q, 0.0)
        merged, merged_lse = self.exchange.combine(out[self.rank], lse[self.rank])
        count = is_here.sum(0)[:, None]
        wanted = (out[:, :, heads].float() * is_here[:, :, None, None]).sum(0) / count[..., None]
        self._expect(merged, wanted, 1.0)  # of 251, in bfloat16
        self._expect(merged_lse, count.log().expand(-1, num_heads), 1e-3)
        self.step += 1

    def _numbers(self, num_parts: int, shape: Shape) -> Tensor:
        """Return integers [N, T, W h, D] that bfloat16 represents exactly."""
        num_tokens, num_heads, width = shape
        numbers = torch.arange(num_parts * num_tokens * self.size * num_heads * width, device="cuda")
        return ((numbers + 37 * self.step) % 251).view(num_parts, num_tokens, -1, width).to(torch.bfloat16)

    def _expect(self, got: Tensor, wanted: Tensor, tolerance: float) -> None:
        self.num_wrong += (~((got.float() - wanted.float()).abs() <= tolerance)).sum()  # NaN counts as wrong


def check_soak() -> None:
    """Exchange 100,000 times."""
    soak, own = Soak(), random.Random(dist.get_rank())
    q = torch.ones(2, 1, 8, dtype=torch.bfloat16, device="cuda")
    for shape in SHAPES:
        soak.exchange_once(shape)
    soak.exchange.gather_heads(q)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for number in range(150):
            soak.exchange_once(SHAPES[number % 3])
    for _ in range(100_000 // 300):
        linger(own)
        graph.replay()
        soak.exchange.gather_heads(q)  # the graph's exchanges take the other landing next time
    assert int(soak.num_wrong) == 0
    check_memory(soak.exchange)


@pytest.mark.gpu_4
@on_ranks(4, device="cuda")
def test_two_groups() -> None:
    """Exchange within two halves, each at its own pace, and among all ranks in between."""
    rank, own = dist.get_rank(), random.Random(dist.get_rank())
    groups = [dist.new_group([first, first + 2]) for first in range(2)]
    exchanges = [exchange_on_gpu(), exchange_on_gpu(group=groups[rank % 2])]
    for seed in range(40):
        linger(own)
        exchange_once(exchanges[seed % 4 != 0], SHAPES[seed % 3], torch.bfloat16, seed, own, num_layouts=1)
    for exchange in exchanges:
        check_memory(exchange)


def check_two_streams() -> None:
    """Exchange on two streams at the same time, now one and now the other late."""
    exchanges, streams = [exchange_on_gpu(), exchange_on_gpu()], [torch.cuda.Stream() for _ in range(2)]
    own, outcomes = random.Random(dist.get_rank()), [[], []]
    inputs = [draw_own(exchanges[0], SHAPES[seed % 3], seed) for seed in range(6)]
    wanted = [exchange_all(exchanges[0], *given) for given in inputs]
    torch.cuda.synchronize()
    for step in range(120):
        for which in range(2):
            with torch.cuda.stream(streams[which]):
                linger(own)
                outcomes[which].append(exchange_all(exchanges[which], *inputs[(step + which) % 6]))
    torch.cuda.synchronize()
    for which, step in itertools.product((0, 1), range(120)):
        assert_same_bits(outcomes[which][step], wanted[(step + which) % 6])
    for exchange in exchanges:
        check_memory(exchange)


def check_context_under_kernels() -> None:
    """Begin context chunks one ahead, as prefill does, under matrix products and a gather of heads; read each late."""
    exchange, rank, own = exchange_on_gpu(), dist.get_rank(), random.Random(dist.get_rank())
    num_rows, width, num_chunks = 4096, 576, 12
    exchange.reserve_context(exchange.size * num_rows, width, torch.bfloat16, exchange.device)
    generator = torch.Generator("cuda").manual_seed(0)
    rows = torch.randn(num_chunks, exchange.size, num_rows, width, generator=generator, device="cuda").to(
        torch.bfloat16
    )
    order = torch.randperm(exchange.size * num_rows, generator=generator, device="cuda")[:-100]
    tokens, matrix = tokens_of_rows(order, num_rows, rank), torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    q, out, lse = draw_own(exchange, SHAPES[1], 0)
    wanted = exchange_all(exchange, q, out, lse)
    started, contexts, outcomes = [exchange.start_context(rows[0, rank], order, tokens)], [], []
    for chunk in range(num_chunks):
        finish = started.pop()
        if chunk + 1 < num_chunks:
            started.append(exchange.start_context(rows[chunk + 1, rank], order, tokens))
        linger(own)
        matrix @ matrix
        outcomes.append(exchange_all(exchange, q, out, lse))
        context = finish()
        linger(own)
        contexts.append(context.clone())
    for chunk in range(num_chunks):
        assert torch.equal(contexts[chunk], rows[chunk].flatten(0, 1)[order])
        assert_same_bits(outcomes[chunk], wanted)
    check_memory(exchange)


@on_gpus(2, 3, 4, 8)
@pytest.mark.parametrize("check", [check_late_ranks, check_soak, check_two_streams, check_context_under_kernels])
def test_exchange(check: Callable[[], None], num_gpus: int) -> None:
    run_ranks(num_gpus, check, device="cuda")
