"""The exchange that compares calls: where calls differ, every rank is told what each was about to call.

test_exchange.py covers equal calls.
"""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from dcpmla.comm.checked import CheckedExchange
from dcpmla.comm.nccl import AllToAll
from tests.support.ranks import run_ranks

T, H, D = 4, 2, 16  # tokens, heads a rank, row width


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(RuntimeError, match="^unequal calls of the exchange: ") as error:
        call()
    return str(error.value).partition("exchange: ")[2]


def check_unequal_calls() -> list[str]:
    """Make unequal calls on one of three ranks; return the text of the errors."""
    group, rank = dist.group.WORLD, dist.get_rank()
    exchange, other = (CheckedExchange(AllToAll(group), group) for _ in range(2))
    q, lse = torch.full((T, H, D), float(rank)), torch.zeros(T, 3 * H)
    rows, tokens = torch.zeros(2, D), torch.zeros(2, dtype=torch.int64)
    dtype, order = torch.bfloat16 if rank == 0 else torch.float32, torch.arange(5)
    words = [
        refused(lambda: exchange.gather_heads(q[: T - (rank == 1)])),
        refused(lambda: exchange.combine(torch.zeros(T, 3 * H, D, dtype=dtype), lse)),
        refused(lambda: exchange.start_context(rows, order, tokens) if rank == 2 else exchange.gather_heads(q)),
        refused(lambda: exchange.reserve_context(9, D + rank, torch.float32, q.device)),
        refused(lambda: exchange.mailbox(T, 3 * H, D, dtype)),
    ]
    assert exchange.gather_heads(q)[0, :, 0].tolist() == [0, 0, 1, 1, 2, 2]  # refused calls leave nothing
    return [*words, refused(lambda: (other if rank == 1 else exchange).gather_heads(q))]


def test_unequal_calls_are_told_on_every_rank() -> None:
    words, *others = run_ranks(3, check_unequal_calls)
    assert others == [words, words]
    q = "gather_heads(q [4, 2, 16] torch.float32)"
    assert words == [
        f"rank 1 makes call 1, gather_heads(q [3, 2, 16] torch.float32); each of ranks 0, 2 makes call 1, {q}",
        "rank 0 makes call 2, combine(out [4, 6, 16] torch.bfloat16, lse [4, 6] torch.float32); "
        "each of ranks 1, 2 makes call 2, combine(out [4, 6, 16] torch.float32, lse [4, 6] torch.float32)",
        "rank 2 makes call 3, start_context(rows [2, 16] torch.float32, order [5] torch.int64, tokens [2] "
        f"torch.int64); each of ranks 0, 1 makes call 3, {q}",
        "; ".join(
            f"rank {rank} makes call 4, reserve_context(rows [9, {D + rank}] torch.float32)" for rank in range(3)
        ),
        "rank 0 makes call 5, mailbox(out [4, 6, 16] torch.bfloat16); "
        "each of ranks 1, 2 makes call 5, mailbox(out [4, 6, 16] torch.float32)",
        f"rank 1 makes call 1, {q}; each of ranks 0, 2 makes call 7, {q}",
    ]
