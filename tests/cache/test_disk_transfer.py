"""Transfers by threads: each ends, and no error of a disk reaches the caller."""

import errno
import logging
import os
import time
from pathlib import Path
from random import Random
from threading import Event, Semaphore, Thread
from typing import Any

import pytest

from dcpmla.cache import disk_transfer
from dcpmla.cache.disk_transfer import DiskTransfers, Transfer
from tests.support.disk import SLOT_BYTES, bytes_of, content_of, key_of, open_file, pieces_of
from tests.support.waiting import wait_until

NUM_SLOTS = 64


def wait(*transfers: Transfer) -> list[bool]:
    """Wait for all transfers; return whether each has succeeded."""
    wait_until(lambda: all(transfer.is_done for transfer in transfers), "transfers do not end", 0.001)
    return [not transfer.has_failed for transfer in transfers]


def write_all(transfers: DiskTransfers) -> None:
    """Write block n to slot n."""
    writes = [transfers.write(slot, key_of(slot), pieces_of(content_of(slot))) for slot in range(NUM_SLOTS)]
    assert all(wait(*writes))


def test_many_transfers(tmp_path: Path) -> None:
    transfers = DiskTransfers(open_file(tmp_path, NUM_SLOTS))
    write_all(transfers)
    slots = Random(0).choices(range(NUM_SLOTS), k=4 * NUM_SLOTS)
    memory = [pieces_of() for _ in slots]
    reads = [transfers.read(slot, key_of(slot), pieces) for slot, pieces in zip(slots, memory, strict=True)]
    assert all(wait(*reads))
    assert all(bytes_of(pieces) == content_of(slot) for slot, pieces in zip(slots, memory, strict=True))
    transfers.close()


def test_close_finishes_writes_and_frees_the_file(tmp_path: Path) -> None:
    transfers = DiskTransfers(open_file(tmp_path, NUM_SLOTS))
    writes = [transfers.write(slot, key_of(slot), pieces_of(content_of(slot))) for slot in range(NUM_SLOTS)]
    transfers.close()
    assert all(write.is_done and not write.has_failed for write in writes)
    for late in (transfers.read(0, key_of(0), pieces_of()), transfers.write(0, key_of(1), pieces_of())):
        assert late.is_done
        assert late.has_failed
    transfers.close()
    assert set(open_file(tmp_path, NUM_SLOTS).stored) == {key_of(slot) for slot in range(NUM_SLOTS)}


def test_close_ends_reads_that_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads under way succeed; reads in the queue fail."""
    file = open_file(tmp_path, NUM_SLOTS)
    begun, may_go, read = Semaphore(0), Event(), file.read

    def slow(*block: Any) -> None:
        begun.release()
        may_go.wait()
        read(*block)

    monkeypatch.setattr(file, "read", slow)
    transfers = DiskTransfers(file)
    write_all(transfers)
    reads = [transfers.read(slot, key_of(slot), pieces_of()) for slot in range(NUM_SLOTS)]
    for _ in range(disk_transfer._NUM_READERS):
        assert begun.acquire(timeout=60)
    closing = Thread(target=transfers.close)
    closing.start()
    while not transfers._is_closed:
        time.sleep(0.001)
    may_go.set()
    closing.join()
    assert sum(wait(*reads)) == disk_transfer._NUM_READERS


def test_failures_are_logged_once_for_each_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    transfers = DiskTransfers(open_file(tmp_path, NUM_SLOTS))
    write_all(transfers)
    (path,) = tmp_path.glob("*/*.blocks")
    with path.open("r+b") as blocks:
        blocks.write(b"damage")

    def fail(descriptor: int, pieces: list[memoryview], offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert wait(transfers.read(0, key_of(0), pieces_of())) == [False]  # damaged
            assert wait(transfers.read(1, key_of(2), pieces_of())) == [False]  # another key
            assert wait(transfers.read(NUM_SLOTS, key_of(1), pieces_of())) == [False]  # no such slot
            assert wait(transfers.write(1, key_of(1), pieces_of()[1:])) == [False]  # too few bytes
            with monkeypatch.context() as patch:
                patch.setattr(os, "pwritev", fail)
                assert wait(transfers.write(3, key_of(3), pieces_of(content_of(3)))) == [False]
            with monkeypatch.context() as patch:
                patch.setattr(os, "preadv", fail)
                assert wait(transfers.read(4, key_of(4), pieces_of())) == [False]
    sizes = f"there are {NUM_SLOTS} slots of {SLOT_BYTES} bytes"
    assert [record.args for record in caplog.records] == [
        ("read", "the content does not match its checksum"),
        ("read", f"slot is {NUM_SLOTS} and pieces has {SLOT_BYTES} bytes; {sizes}"),
        ("write", f"slot is 1 and pieces has {SLOT_BYTES - 4096} bytes; {sizes}"),
        ("write", "[Errno 28] No space left on device"),
        ("read", "[Errno 28] No space left on device"),
    ]
    assert "read of a block on the disk of --kv-offloading-path: the content" in caplog.records[0].getMessage()
    assert wait(transfers.read(5, key_of(5), pieces_of())) == [True]  # All threads still serve.
    transfers.close()


def test_a_slow_disk_cannot_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = open_file(tmp_path, NUM_SLOTS)
    may_go = Event()
    monkeypatch.setattr(disk_transfer, "_MAX_WAITING", 5)
    monkeypatch.setattr(file, "write", lambda *block: may_go.wait())
    file.write.__name__ = "write"
    transfers = DiskTransfers(file)
    writes = [transfers.write(slot, key_of(slot), pieces_of()) for slot in range(20)]
    assert 13 <= sum(write.is_done and write.has_failed for write in writes) <= 15
    may_go.set()
    assert 5 <= sum(wait(*writes)) <= 7  # The threads had taken two at most.
    assert [record.args for record in caplog.records] == [("write", "more than 5 transfers wait")]
    transfers.close()


def test_memory_is_released(tmp_path: Path) -> None:
    """A thread that waits holds no memory of the transfer before."""
    transfers = DiskTransfers(open_file(tmp_path, NUM_SLOTS))
    memory = bytearray(bytes_of(pieces_of()))
    wait(transfers.read(0, key_of(0), [memoryview(memory)]))
    deadline = time.monotonic() + 60
    while True:
        try:
            memory.clear()  # It raises BufferError while a view exists.
            break
        except BufferError:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    transfers.close()
