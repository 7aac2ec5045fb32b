"""Values of ranks as JSON: ragged lengths, any Unicode, subgroups, and the first rank's for all."""

from typing import Any

import torch.distributed as dist

from dcpmla.parallel.collectives import broadcast_value, gather_values
from tests.support.ranks import run_ranks

VALUES: list[Any] = [
    {"a": [1, 2.5, None, True], "b": {"c": "x" * 5000}},
    "",
    "\ud800 \u00fc \U0001f600",
    [-(1 << 70)],
    0,
]


def check_values() -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    assert gather_values(VALUES[rank], None, "a test") == VALUES[:num_ranks]
    assert gather_values((rank, ()), None, "a test") == [[other, []] for other in range(num_ranks)]
    for value in VALUES:
        assert broadcast_value(value if rank == 0 else {"ignored": rank}, None, "a test") == value
    pairs = [dist.new_group([first, first + 1]) for first in range(0, num_ranks - 1, 2)]
    if rank // 2 < len(pairs):
        pair, first = pairs[rank // 2], rank // 2 * 2
        assert gather_values(rank, pair, "a test") == [first, first + 1]
        assert broadcast_value(rank, pair, "a test") == first


def test_values_of_all_ranks() -> None:
    run_ranks(5, check_values)
    run_ranks(1, check_values)
