"""The exchange `direct`: its kernels in Triton's interpreter, on ranks that share memory, and what it refuses."""

import random
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import CrossRefFakeMode

from dcpmla.comm import direct, direct_ops, place
from dcpmla.parallel.collectives import PeerFault
from tests.support.direct_checks import (
    DTYPES,
    check_memory,
    draw,
    exchange_bytes,
    exchange_candidates,
    exchange_contexts,
    exchange_once,
    tokens_of_rows,
)
from tests.support.ranks import on_ranks
from tests.support.shared_memory import allocate, delay_kernels, run_interpreted


def new_exchange(**changes: Any) -> direct.DirectExchange:
    options = {
        "group": dist.group.WORLD,
        "device": torch.device("cpu"),
        "landing_bytes": 1 << 15,
        "allocate": allocate,
        **changes,
    }
    return direct.DirectExchange(**options)


def exchange_without_pause(exchange: direct.DirectExchange, num_exchanges: int, own: random.Random) -> None:
    """Exchange with nothing in between but random delays, so that ranks get as far ahead as they can."""
    rank = dist.get_rank(exchange.group)
    draws = [draw(exchange, (1, 1, 8), torch.float16, seed)[0] for seed in range(num_exchanges)]
    delay_kernels(own, 0.2)
    gathered = [exchange.gather_heads(q[:, rank : rank + 1]) for q in draws]
    delay_kernels(own)
    torch.testing.assert_close(gathered, draws, atol=0, rtol=0, equal_nan=True)


def check_exchanges(num_steps: int) -> None:
    """Exchange over two groups in turn where there are enough ranks; one group's exchange numbers pass 32 bits."""
    rank, size = dist.get_rank(), dist.get_world_size()
    common, own = random.Random(size), random.Random(rank)
    delay_kernels(own)
    direct._WINDOW_BYTES = 4096
    direct_ops.NUM_PROGRAMS, place.NUM_PROGRAMS, place._PROGRAMS = 8, 8, 4  # each with several items
    direct_ops._SHAPES = tuple((columns, num_items // 256) for columns, num_items in direct_ops._SHAPES)
    exchanges = [new_exchange(), new_exchange(landing_bytes=1024 * size), new_exchange(is_fp8=True)]
    if size > 3:
        groups = [dist.new_group(list(range(first, size, 2))) for first in range(2)]
        exchanges.append(new_exchange(group=groups[rank % 2]))
    exchanges[0]._mailbox.state[:-1] = 2**31 - 6
    for step in range(num_steps):
        shape = common.choice((1, 2, 3, 6)), common.randint(1, 3), common.choice((8, 40, 72))
        exchange_once(exchanges[step % len(exchanges)], shape, common.choice(DTYPES), step, own)
    exchange_without_pause(exchanges[0], 2 * num_steps, own)
    exchange_contexts(exchanges[-1], 6, common, own)
    exchange_bytes(exchanges[2])
    exchange_candidates(exchanges[2])
    for exchange in exchanges:
        assert exchange.gather_heads(torch.empty(0, 2, 8)).shape == (0, 2 * exchange.size, 8)
        check_memory(exchange)


@pytest.mark.parametrize(("num_ranks", "num_steps"), [pytest.param(2, 9, marks=pytest.mark.thorough), (3, 6), (8, 4)])
def test_exchanges(num_ranks: int, num_steps: int) -> None:
    run_interpreted(num_ranks, check_exchanges, num_steps)


@on_ranks(11, run_interpreted)
def test_missing_rank() -> None:
    """Leave the first of eleven ranks out of five groups of three, each with an operation of its own.

    The others wait for it once, in whatever number of turns, then no more; among themselves exchanges work.
    """
    rank, own, missing = dist.get_rank(), random.Random(dist.get_rank()), 0
    delay_kernels(own)
    groups = [[missing, 2 * number + 1, 2 * number + 2] for number in range(5)]
    all_groups = [dist.new_group(ranks) for ranks in groups]
    rest = dist.new_group([1, 2])
    q, lse, order = torch.zeros(12, 1, 8), torch.zeros(12, 3), torch.arange(36)
    calls: list[tuple[str, int, int, Callable[[direct.DirectExchange], Any]]] = [
        ("gather_heads", 2048, 1, lambda exchange: exchange.gather_heads(q)),  # through the window
        ("gather_heads", 384, 7, lambda exchange: exchange.gather_heads(q)),
        ("gather_candidates", 384, 7, lambda exchange: exchange.gather_candidates(q[:, 0].view(torch.int64))),
        ("combine", 384, 7, lambda exchange: exchange.combine(q.expand(12, 3, 8), lse)),
        (
            "gather_context",
            384,
            1,
            lambda exchange: exchange.start_context(q[:, 0], order, tokens_of_rows(order, 12, 2 - rank % 2))(),
        ),
    ]
    for number, group in enumerate(all_groups):
        if rank in groups[number]:
            exchange_once(new_exchange(group=group), (2, 1, 8), torch.float32, 0, own)  # the first call is slow
    direct._WINDOW_BYTES = 1152
    exchanges = [
        new_exchange(group=group, landing_bytes=calls[number][1], timeout=2.0)
        for number, group in enumerate(all_groups)
        if rank in groups[number]
    ]
    for exchange in exchanges:
        exchange.reserve_context(36, 8, q.dtype, q.device)
    if rank == missing:
        return
    (operation, _, turn, call), (exchange,) = calls[(rank - 1) // 2], exchanges
    exchange._mailbox.state[:-1] = 6
    assert seconds(call, exchange) >= 2.0
    here = f"rank {rank} of the group {groups[(rank - 1) // 2]}"
    words = f"{operation} failed on {here}: nothing came from rank {missing} for 2 s"
    for again in (exchange.check, lambda: call(exchange)):
        with pytest.raises(PeerFault, match=f"{re.escape(f'{words}, in exchange {turn}')}$"):
            again()
    exchange.fault.zero_()  # so that kernels run as they do in graphs
    exchange._mailbox = exchange._mailbox._replace(timeout=3600.0)
    call(exchange)  # a call that waited for the missing rank would outlast the test
    if rank < 3:
        check_two_of_three(rest, q, own)


def check_two_of_three(rest: dist.ProcessGroup, q: Tensor, own: random.Random) -> None:
    """Exchange among the ranks that are here, until one of them goes on alone."""
    exchange = new_exchange(group=rest)
    for step in range(3):
        exchange_once(exchange, (2, 1, 8), torch.float32, step, own)
    exchange._mailbox = exchange._mailbox._replace(timeout=1.0)
    if dist.get_rank() == 1:
        exchange.gather_heads(q)
        words = r"on rank 1 of the group \[1, 2\]: nothing came from rank 2 for 1 s, in exchange 7"
        with pytest.raises(PeerFault, match=words):
            exchange.check()


def seconds(call: Callable[..., Any], *args: Any) -> float:
    start = time.monotonic()
    call(*args)
    return time.monotonic() - start


@on_ranks(2, run_interpreted)
def test_operators() -> None:
    """Check the operators under torch.compile, which may copy tensors, and with fake tensors; and what they refuse."""
    delay_kernels(random.Random(dist.get_rank()))
    direct._WINDOW_BYTES = 2048
    exchange = new_exchange()

    def attend(q: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        return exchange.combine(2 * exchange.gather_heads(q + 1), lse)

    for num_tokens in (3, 6):
        given = torch.randn(num_tokens, 2, 24), torch.zeros(num_tokens, 4)
        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")(*given)
        assert all(torch.equal(got, wanted) for got, wanted in zip(compiled, attend(*given), strict=True))

    q, out, lse = draw(exchange, (3, 2, 24), torch.float16, 0)
    rank, order = dist.get_rank(), torch.arange(6)
    # What opcheck compares, but that gives an operator copies of its arguments: peers do not write to a copy.
    with CrossRefFakeMode(lambda operator: operator.namespace != "dcpmla", only_check_ops_with_meta=False):
        exchange.gather_heads(q[:, :2])
        exchange.combine(out[rank], lse[rank])
        exchange.start_context(out[rank, :, 0], order, tokens_of_rows(order, 3, rank))()

    small = new_exchange(landing_bytes=128)
    for match, call in {
        "q has dtype torch.float64; direct carries torch.bfloat16, torch.float16, torch.float32": lambda: (
            small.gather_heads(q.double())
        ),
        "out has rows of 12 torch.float16; direct carries multiples of 16 bytes": lambda: small.combine(
            out[rank, ..., :12], lse[rank]
        ),
        "rows has dtype torch.int64": lambda: small.start_context(q[0].long(), order, order[:4]),
        "landing_bytes is 128; a token's rows of all ranks take 384": lambda: small.gather_heads(q),
        "landing_bytes is 128; a token's rows of all ranks take 512": lambda: small.combine(
            out[rank, ..., :8], lse[rank]
        ),
    }.items():
        with pytest.raises(ValueError, match=match):
            call()


@pytest.mark.parametrize("size", [1, 9])
def test_groups_of_other_sizes_are_refused(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda group: size)
    with pytest.raises(ValueError, match=f"group has {size} ranks; direct takes 2 to 8"):
        new_exchange()
