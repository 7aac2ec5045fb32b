"""Files of blocks: blocks are read as they were written, and damaged or foreign ones are refused."""

import contextlib
import errno
import itertools
import multiprocessing
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpmla.cache import disk_file
from dcpmla.cache.disk_file import RECORD_BYTES, BlockFile, DamagedBlockError, slots_within
from dcpmla.cache.disk_folder import DiskFolder
from tests.support.disk import IDENTITY, SLOT_BYTES, content_of, key_of, open_file, pieces_of, read_slot
from tests.support.ranks import start_process


def path_of(directory: Path, suffix: str = "blocks") -> Path:
    (path,) = directory.glob(f"*/*.{suffix}")
    return path


def fill(directory: Path, num_slots: int = 4) -> None:
    """Write block n to slot n."""
    file = open_file(directory, num_slots)
    for slot in range(num_slots):
        file.write(slot, key_of(slot), pieces_of(content_of(slot)))
    file.close()


def readable(file: BlockFile) -> dict[int, bytes]:
    """Contents by slot of all blocks that `stored` offers and that can be read."""
    contents = {}
    for key, slot in file.stored.items():
        try:
            contents[slot] = read_slot(file, slot, key)
        except DamagedBlockError:
            continue
    return contents


@pytest.fixture(params=["disk", "memory"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Return a directory on a disk, or one on a file system in memory."""
    if request.param == "disk":
        yield tmp_path
        return
    with TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


def test_blocks_are_read_after_a_restart(directory: Path) -> None:
    fill(directory)
    assert path_of(directory).read_bytes() == b"".join(map(content_of, range(4)))
    file = open_file(directory)
    assert list(file.stored.items()) == [(key_of(slot), slot) for slot in range(4)]
    assert readable(file) == {slot: content_of(slot) for slot in range(4)}
    file.write(1, key_of(9), pieces_of(content_of(9)))
    assert read_slot(file, 1, key_of(9)) == content_of(9)
    with pytest.raises(DamagedBlockError, match="another block"):
        file.read(1, key_of(1), pieces_of())
    file.close()
    assert list(open_file(directory).stored.items()) == [(key_of(number), number % 8) for number in (0, 2, 3)] + [
        (key_of(9), 1)
    ]


@pytest.mark.parametrize("num_slots", [1, 3, 6])
def test_a_file_of_another_size_keeps_the_blocks_that_fit(tmp_path: Path, num_slots: int) -> None:
    fill(tmp_path)
    file = open_file(tmp_path, num_slots)
    assert readable(file) == {slot: content_of(slot) for slot in range(min(4, num_slots))}
    file.write(num_slots - 1, key_of(7), pieces_of(content_of(7)))
    assert read_slot(file, num_slots - 1, key_of(7)) == content_of(7)
    file.close()
    files = path_of(tmp_path), path_of(tmp_path, "index")
    assert [path.stat().st_size for path in files] == [num_slots * SLOT_BYTES, num_slots * RECORD_BYTES]
    assert slots_within(sum(path.stat().st_size for path in files), SLOT_BYTES) == num_slots


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def exchange(path: Path, size: int) -> None:
    """Exchange parts 1 and 2."""
    data = path.read_bytes()
    path.write_bytes(data[:size] + data[2 * size : 3 * size] + data[size : 2 * size] + data[3 * size :])


DAMAGE: dict[str, tuple[Callable[[Path, Path], object], set[int]]] = {  # slots that are still good
    "a bit of a block": (lambda blocks, index: flip(blocks, SLOT_BYTES + 5000), {0, 2, 3}),
    "a bit of a key": (lambda blocks, index: flip(index, 2 * RECORD_BYTES + 8), {0, 1, 3}),
    "a bit of a number": (lambda blocks, index: flip(index, 2 * RECORD_BYTES), {0, 1, 3}),
    "a bit of a checksum": (lambda blocks, index: flip(index, RECORD_BYTES + 40), {0, 2, 3}),
    "a bit of a seal": (lambda blocks, index: flip(index, RECORD_BYTES + 72), {0, 2, 3}),
    "blocks exchanged": (lambda blocks, index: exchange(blocks, SLOT_BYTES), {0, 3}),
    "records exchanged": (lambda blocks, index: exchange(index, RECORD_BYTES), {0, 3}),
    "both exchanged": (lambda *paths: list(map(exchange, paths, (SLOT_BYTES, RECORD_BYTES))), {0, 3}),
    "blocks cut off": (lambda blocks, index: os.truncate(blocks, 2 * SLOT_BYTES + 100), {0, 1}),
    "records cut off": (lambda blocks, index: os.truncate(index, RECORD_BYTES + 100), {0}),
    "no blocks": (lambda blocks, index: os.truncate(blocks, 0), set()),
    "no index": (lambda blocks, index: index.unlink(), set()),
    "an index of zeros": (lambda blocks, index: index.write_bytes(bytes(4 * RECORD_BYTES)), set()),
    "an index of noise": (lambda blocks, index: index.write_bytes(os.urandom(4 * RECORD_BYTES)), set()),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_a_miss(tmp_path: Path, name: str) -> None:
    fill(tmp_path)
    damage, good = DAMAGE[name]
    damage(path_of(tmp_path), path_of(tmp_path, "index"))
    assert readable(open_file(tmp_path)) == {slot: content_of(slot) for slot in good}


def test_a_file_that_shrinks_under_the_reader(tmp_path: Path) -> None:
    fill(tmp_path)
    file = open_file(tmp_path)
    os.truncate(path_of(tmp_path), SLOT_BYTES)
    assert read_slot(file, 0, key_of(0)) == content_of(0)
    with pytest.raises(OSError, match="ends too early"):
        file.read(2, key_of(2), pieces_of())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_file_of_another_identity_or_rank_is_a_miss(tmp_path: Path, rank: int) -> None:
    """The files were copied into a folder that is not their own."""
    fill(tmp_path)
    identity = {**IDENTITY, "model": "d2"} if rank == 0 else IDENTITY
    folder = DiskFolder(tmp_path / "other", identity)
    for suffix in ("blocks", "index"):
        shutil.copy(path_of(tmp_path, suffix), folder.path / f"rank{rank}.0.{suffix}")
    file = BlockFile(folder.claim(rank), 4, SLOT_BYTES)
    assert not file.stored
    with pytest.raises(DamagedBlockError, match="another block"):
        file.read(0, key_of(0), pieces_of())


def test_slots_of_another_size_are_misses(tmp_path: Path) -> None:
    fill(tmp_path)
    assert not BlockFile(DiskFolder(tmp_path, IDENTITY).claim(0), 4, SLOT_BYTES // 5).stored


Move = tuple[int, int] | None  # slot and number of a block to write; None to close and open the file
MOVES = st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 3), st.integers(0, 7))), max_size=20)


@given(moves=MOVES)
def test_any_writes(tmp_path_factory: pytest.TempPathFactory, moves: list[Move]) -> None:
    """Compare with a dict of slots in the order of writes."""
    directory = tmp_path_factory.mktemp("blocks")
    file, expected = open_file(directory), dict[int, int]()
    for move in [*moves, None]:
        if move is not None:
            slot, number = move
            expected.pop(slot, None)
            expected[slot] = number
            file.write(slot, key_of(number), pieces_of(content_of(number)))
            continue
        for slot, number in expected.items():
            assert read_slot(file, slot, key_of(number)) == content_of(number)
        file.close()
        file = open_file(directory)
        newest = {number: slot for slot, number in expected.items()}
        order = [(key_of(number), slot) for slot, number in expected.items() if newest[number] == slot]
        assert list(file.stored.items()) == order
    file.close()


class Calls:
    """os.preadv or os.pwritev that moves few bytes and few pieces at a time, or raises an error after some calls."""

    def __init__(self, call: Callable[..., int], fail_after: int | None = None) -> None:
        self.call, self.left = call, fail_after
        self.num_calls = self.most_pieces = 0

    def __call__(self, descriptor: int, pieces: list[memoryview], offset: int) -> int:
        self.num_calls += 1
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        self.most_pieces = max(self.most_pieces, len(pieces))
        return self.call(descriptor, [pieces[0][:4096]], offset)


def test_calls_that_move_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = open_file(tmp_path)
    reads, writes = Calls(os.preadv), Calls(os.pwritev)
    monkeypatch.setattr(disk_file, "_MAX_PIECES", 2)
    monkeypatch.setattr(os, "preadv", reads)
    monkeypatch.setattr(os, "pwritev", writes)
    file.write(3, key_of(0), pieces_of(content_of(0)))
    assert read_slot(file, 3, key_of(0)) == content_of(0)
    assert (reads.num_calls, writes.num_calls) == (SLOT_BYTES // 4096, SLOT_BYTES // 4096 + 2)
    assert reads.most_pieces == writes.most_pieces == 2


@pytest.mark.parametrize("fail_after", [0, 1, 2, 6])
def test_a_write_that_fails_leaves_no_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail_after: int) -> None:
    """It fails at the old record, at the content, in the middle of the content, at the new record."""
    fill(tmp_path)
    file = open_file(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", Calls(os.pwritev, fail_after))
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            file.write(1, key_of(9), pieces_of(content_of(9)))
    for number in (1, 9):
        with pytest.raises(DamagedBlockError):
            file.read(1, key_of(number), pieces_of())
    file.close()
    kept = {0, 2, 3} if fail_after else {0, 1, 2, 3}  # Nothing has been written if the record was not cleared.
    assert readable(open_file(tmp_path)) == {slot: content_of(slot) for slot in kept}


def test_a_disk_without_room(tmp_path: Path) -> None:
    """A limit of this process stands for the end of the disk: the kernel refuses a larger file."""
    fill(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * SLOT_BYTES, limits[1]))
    try:
        with pytest.raises(ValueError, match="File too large") as caught:
            open_file(tmp_path, 5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    words = "kv_offloading_disk_size (--kv-offloading-disk-size)", "--kv-offloading-path", f"needs {5 * SLOT_BYTES} "
    assert all(word in str(caught.value) for word in words), caught.value
    assert path_of(tmp_path).stat().st_size == 4 * SLOT_BYTES
    assert len(readable(open_file(tmp_path))) == 4  # The lock is free, and nothing is lost.


@pytest.mark.parametrize(
    ("num_slots", "slot_bytes", "message"),
    [
        (
            0,
            SLOT_BYTES,
            rf"--kv-offloading-disk-size\) has room for 0 blocks on a rank; .* {SLOT_BYTES + RECORD_BYTES}",
        ),
        (1, 5000, "slot_bytes is 5000; it must be a positive multiple of 4096"),
    ],
)
def test_wrong_sizes(tmp_path: Path, num_slots: int, slot_bytes: int, message: str) -> None:
    claimed = DiskFolder(tmp_path, IDENTITY).claim(0)
    with pytest.raises(ValueError, match=message):
        BlockFile(claimed, num_slots, slot_bytes)
    assert DiskFolder(tmp_path, IDENTITY).claim(0).blocks == claimed.blocks  # The lock is free.


def write_until_killed(directory: Path, seed: int, sender: Connection) -> None:
    file = open_file(directory)
    sender.send("begins")
    for number in itertools.count(seed << 32):
        file.write(Random(number).randrange(4), key_of(number), pieces_of(content_of(number)))
        sender.send((key_of(number + 1), number + 1))


def test_kills_in_the_middle_of_writes(tmp_path: Path) -> None:
    """After each kill all records that are found describe their slots: a kill costs one block at most."""
    fill(tmp_path)
    numbers = {key_of(number): number for number in range(4)}
    for seed in range(1, 31):
        receiver, sender = multiprocessing.Pipe(duplex=False)
        process = start_process(write_until_killed, (tmp_path, seed, sender))
        sender.close()
        assert receiver.recv() == "begins"
        numbers[key_of(seed << 32)] = seed << 32
        time.sleep(Random(seed).random() / 100)
        process.kill()
        process.join()
        with contextlib.suppress(EOFError):
            while True:
                key, number = receiver.recv()
                numbers[key] = number
        file = open_file(tmp_path)
        assert len(file.stored) >= 3
        for key, slot in file.stored.items():
            assert read_slot(file, slot, key) == content_of(numbers[key])
        for slot in range(4):
            file.write(slot, key_of(slot), pieces_of(content_of(slot)))
        file.close()
