"""Many small handoffs between ranks in processes of their own, over both transports."""

import pytest

from dcpmla.transfer.layout import CacheLayout
from tests.support.plain_cache import new_layout
from tests.support.ranks import run_ranks
from tests.support.transfer_soak import soak


@pytest.mark.parametrize(
    ("kind", "source", "target", "number"),
    [
        pytest.param("nixl", new_layout(1, 1, 1, 4), new_layout(2, 2, 1, 4), 40, marks=pytest.mark.thorough),
        pytest.param("nixl", new_layout(2, 2, 4), new_layout(1, 1, 1, 2), 40, marks=pytest.mark.thorough),
        ("nixl", new_layout(2, 1, 1, 4), new_layout(2, 2, 2), 40),
        ("point to point", new_layout(1, 1, 1, 4), new_layout(2, 2, 1, 4), 30),
    ],
)
def test_all_bytes_arrive(kind: str, source: CacheLayout, target: CacheLayout, number: int) -> None:
    moved = run_ranks(source.tp_size + target.tp_size, soak, kind, source, target, number)
    assert sum(moved[: source.tp_size]) == sum(moved[source.tp_size :]) > 0


@pytest.mark.gpu
def test_all_bytes_arrive_between_processes_on_a_gpu() -> None:
    pytest.importorskip("dcpmla.transfer.nixl", reason="nixl is not installed", exc_type=ImportError)
    source, target = new_layout(2, 2, 4), new_layout(1, 1, 1, 2)
    moved = run_ranks(3, soak, "nixl", source, target, 100, "cuda:0")
    assert moved[0] + moved[1] == moved[2] > 0
