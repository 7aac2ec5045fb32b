"""What transports between processes share: metadata, connections, and the ends of reads. Errors in the thread of
transfers fail transfers and do not end it. Many small handoffs between ranks in processes of their own, over both
transports.
"""

import logging
from threading import Event

import pytest
import torch

from dcpmla.transfer.layout import CacheLayout
from dcpmla.transfer.transport import Read, Slots, Transport
from dcpmla.transfer.worker import Found, Worker, pause_after
from tests.support.plain_cache import new_layout
from tests.support.ranks import run_ranks
from tests.support.transfer_soak import soak

CPU = torch.device("cpu")


class Noting(Transport):
    """A transport that notes its connections."""

    def __init__(self, name: str) -> None:
        super().__init__(name, torch.zeros(2, 64, dtype=torch.uint8), Slots("agent", 0, 2, 64, "DRAM"))
        self.added: list[str] = []

    def _add(self, name: str, remote: Slots) -> None:
        if remote.kind != "DRAM":
            raise ValueError("its kind is wrong")
        self.added.append(name)

    def _remove(self, name: str) -> None:
        self.added.remove(name)

    def send(self, name: str, message: bytes) -> None:
        raise NotImplementedError

    def receive(self) -> list[tuple[str, bytes]]:
        return []

    def read(self, name: str, there: int, here: int, num_bytes: int, message: bytes) -> Read:
        raise NotImplementedError


def test_ranks_are_connected_once_with_their_own_metadata() -> None:
    one, other = Noting("a/0"), Noting("b/0")
    good = other.metadata()
    wrong = [b"", b"{}", b"[]", good[:-2], good.replace(b"b/0", b"c/0"), good.replace(b"DRAM", b"FILE")]
    for metadata in [*wrong, good.replace(b"64", b"true"), good.replace(b"64", b'"64"')]:
        with pytest.raises(ValueError, match="the metadata of b/0 is wrong"):
            one.connect("b/0", metadata)
    one.connect("b/0", good)
    with pytest.raises(ValueError, match="b/0 is connected already"):
        one.connect("b/0", good)
    assert one.added == ["b/0"]
    one.disconnect("b/0")
    one.disconnect("b/0")
    one.connect("b/0", good)
    one.close()
    assert one.added == []


def test_reads_name_slots_that_both_ends_have() -> None:
    one = Noting("a/0")
    with pytest.raises(ConnectionError, match="b/0 is not connected"):
        one._source_of("b/0", 0, 0, 64)
    one.connect("b/0", Noting("b/0").metadata())
    assert one._source_of("b/0", 1, 0, 64) == one._own
    for there, here, num_bytes in ((2, 0, 64), (0, 2, 64), (0, 0, 65), (0, 0, 0), (-1, 0, 64)):
        with pytest.raises(ValueError, match="a read of"):
            one._source_of("b/0", there, here, num_bytes)


def test_an_error_fails_the_transfers_and_the_thread_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    reasons, done, number = [], Event(), 0

    def poll() -> Found:
        nonlocal number
        number += 1
        if number in (2, 4):
            raise RuntimeError("the network is gone")
        if number == 6:
            done.set()
        return Found(True, False)

    def fail(reason: str) -> None:
        reasons.append(reason)
        raise ConnectionError("nobody hears of it")

    worker = Worker("test", CPU, poll, fail)
    with caplog.at_level(logging.ERROR):
        worker.start()
        assert done.wait(60)
        worker.close()
    assert reasons == 2 * ["RuntimeError: the network is gone"]
    assert len(caplog.records) == 1


def test_pauses_follow_the_time_of_the_wait() -> None:
    """An answer waits for at most 2 % longer, from 1.3 ms on, and as long as pauses are not the longest ones."""
    assert pause_after(0.0, False) == pause_after(1e-3, True) == 2e-5
    assert pause_after(6.4e-3, True) == pause_after(6.4e-3, False) == pytest.approx(1e-4)
    assert pause_after(10.0, True) == 2e-4
    assert pause_after(10.0, False) == 2e-3


def test_it_polls_once_more_before_it_ends() -> None:
    calls, polled = ["last"], []
    worker = Worker(
        "test", CPU, lambda: Found(bool(polled.append(calls.pop() if calls else "")), False), lambda reason: None
    )
    worker.start()
    worker.close()
    assert "last" in polled


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
