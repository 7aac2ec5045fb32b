"""Folders of blocks: the file of a job, files to remove, files of others."""

import fcntl
import json
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from dcpmla.cache.disk_folder import DiskFolder
from tests.support.disk import IDENTITY, content_of, key_of, open_file, pieces_of, read_slot
from tests.support.ranks import start_process

OTHER = {**IDENTITY, "layout": "tp 4, dcp 2, interleave 16"}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def hold(directory: Path, sender: Connection) -> None:
    file = open_file(directory)
    file.write(0, key_of(1), pieces_of(content_of(1)))
    sender.send("holds")
    time.sleep(600)


@contextmanager
def other_job(directory: Path) -> Iterator[None]:
    """Open a file of rank 0 in another process, which writes block 1 and is killed in the end."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = start_process(hold, (directory, sender))
    try:
        assert receiver.poll(60)
        yield
    finally:
        process.kill()
        process.join()


def test_two_jobs_on_one_directory(tmp_path: Path) -> None:
    """The second job gets a file of its own; when both have ended, the newest is kept and the other one removed."""
    with other_job(tmp_path):
        file = open_file(tmp_path)
        assert not file.stored
        file.write(0, key_of(2), pieces_of(content_of(2)))
        folder = DiskFolder(tmp_path, IDENTITY).path
        both = {f"rank0.{generation}.{suffix}" for generation in (0, 1) for suffix in ("blocks", "index")}
        assert names(folder) == both | {"identity.json"}
        file.close()
    file = open_file(tmp_path)
    assert list(file.stored) == [key_of(2)]
    assert read_slot(file, 0, key_of(2)) == content_of(2)
    assert names(folder) == {"rank0.1.blocks", "rank0.1.index", "identity.json"}


def test_a_file_that_is_removed_before_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that has opened a removed file must not use it: other jobs could not see it."""
    open_file(tmp_path).close()
    blocks = DiskFolder(tmp_path, IDENTITY).path / "rank0.0.blocks"
    lock = fcntl.flock

    def remove_and_lock(descriptor: int, operation: int) -> None:
        blocks.unlink(missing_ok=True)
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", remove_and_lock)
    claimed = DiskFolder(tmp_path, IDENTITY).claim(0)
    assert claimed.blocks.name == "rank0.1.blocks"
    assert claimed.blocks.exists()


def test_ranks_have_files_of_their_own(tmp_path: Path) -> None:
    claims = [DiskFolder(tmp_path, IDENTITY).claim(rank) for rank in (1, 10, 0)]
    assert [claimed.blocks.name for claimed in claims] == ["rank1.0.blocks", "rank10.0.blocks", "rank0.0.blocks"]
    assert len({claimed.owner for claimed in claims}) == 3


def test_the_identity_is_readable(tmp_path: Path) -> None:
    folder = DiskFolder(tmp_path / "new" / "directory", IDENTITY)
    assert json.loads((folder.path / "identity.json").read_text()) == IDENTITY
    assert DiskFolder(tmp_path / "new" / "directory", dict(reversed(IDENTITY.items()))).path == folder.path
    assert not folder.others


def test_another_identity_is_reported_and_then_removed(tmp_path: Path) -> None:
    file = open_file(tmp_path)
    assert not DiskFolder(tmp_path, IDENTITY).others
    other = DiskFolder(tmp_path, OTHER)
    assert other.others == [IDENTITY]
    other.claim(0)
    assert DiskFolder(tmp_path, OTHER).others == [IDENTITY]  # A job runs with it: its files stay.
    file.write(0, key_of(1), pieces_of(content_of(1)))
    file.close()
    DiskFolder(tmp_path, OTHER).claim(1)
    assert not DiskFolder(tmp_path, OTHER).others
    assert names(DiskFolder(tmp_path, IDENTITY).path) == {"identity.json"}
    assert not open_file(tmp_path).stored


def test_files_of_others_are_not_touched(tmp_path: Path) -> None:
    """Whatever a directory holds, folders of another name, or without an identity of their name, are not ours."""
    foreign = [tmp_path / "a" / "rank0.0.blocks", tmp_path / ("0" * 64) / "rank0.0.blocks", tmp_path / "b.blocks"]
    foreign.append(tmp_path / ("1" * 64) / "rank0.0.blocks")
    foreign.append(tmp_path / ("2" * 64) / "rank0.0.blocks")
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"mine")
    (foreign[-1].parent / "identity.json").write_text(json.dumps(OTHER))
    (foreign[-2].parent / "identity.json").write_text("no json")
    folder = DiskFolder(tmp_path, IDENTITY)
    assert not folder.others
    folder.claim(0)
    assert all(path.read_bytes() == b"mine" for path in foreign)
