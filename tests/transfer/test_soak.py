"""Many small handoffs between ranks in processes of their own, over both transports."""

import pytest

from dcpmla.transfer.layout import CacheLayout
from tests.support.ranks import run_ranks
from tests.support.transfer_soak import soak


@pytest.mark.parametrize(
    ("kind", "source", "target", "number"),
    [
        ("nixl", CacheLayout(1, 1, 1, 8), CacheLayout(2, 2, 1, 16), 300),
        ("nixl", CacheLayout(2, 2, 4, 16), CacheLayout(1, 1, 1, 4), 300),
        ("nixl", CacheLayout(2, 1, 1, 8), CacheLayout(2, 2, 2, 8), 300),
        ("point to point", CacheLayout(1, 1, 1, 8), CacheLayout(2, 2, 1, 16), 60),
    ],
)
def test_all_bytes_arrive(kind: str, source: CacheLayout, target: CacheLayout, number: int) -> None:
    figures = run_ranks(source.tp_size + target.tp_size, soak, kind, source, target, number)
    sent = sum(figure["bytes"] for figure in figures[: source.tp_size])
    assert sent == sum(figure["bytes"] for figure in figures[source.tp_size :]) > 0
