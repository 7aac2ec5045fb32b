"""A file of blocks: slots of equal size, each with a record of its key and its content in an index file.

A write clears the slot's record, writes the content, then writes the record. When the process is killed, the kernel
keeps all writes before the kill, so a record that is found describes its slot. When power fails, the disk may hold any
mix of old and new pages: a record may describe content that is gone. Its digest does not match, so the block is a miss.
No state of the files makes a wrong block pass for a right one.
"""

import errno
import fcntl
import itertools
import mmap
import os
import struct
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from hashlib import sha256
from typing import NamedTuple

from dcpmla.cache.disk_folder import ClaimedFile

ALIGNMENT = 4096  # bytes of addresses, offsets and sizes, for reads and writes that bypass the page cache
_MAX_PIECES = os.sysconf("SC_IOV_MAX")
# Sequence number, key, content digest, seal: a digest of the other fields, the slot's number and the file's owner.
_RECORD = struct.Struct("<Q32s32s32s24x")
RECORD_BYTES = _RECORD.size  # divides a sector, so that a record is written whole
_NO_RECORD = bytes(RECORD_BYTES)
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class DamagedBlockError(Exception):
    """A slot without the requested block, or with a damaged one."""


class _Record(NamedTuple):
    key: bytes
    digest: bytes  # SHA-256 of the content


def slots_within(num_bytes: int, slot_bytes: int) -> int:
    """Return how many slots of `slot_bytes` a file of a rank holds, its index included, within `num_bytes`."""
    return num_bytes // (slot_bytes + RECORD_BYTES)


class BlockFile:
    """A file of `num_slots` slots for blocks, with their records.

    Reads and writes of different slots may run in several threads. No two at the same time may use the same slot.

    Args:
        claimed: The locked file of `DiskFolder.claim`. It may hold blocks, also of another number of slots. The lock
            ends at `close`, or if the constructor fails.
        num_slots: Size in slots, at least 1 (`slots_within`). All of it is allocated on the disk.
        slot_bytes: Size of a slot, a multiple of `ALIGNMENT`.
    Attributes:
        stored: Slots by key of the blocks in the file when it was opened, the oldest block first.
    Raises:
        ValueError: A size is wrong, or the disk does not have the room.
    """

    def __init__(self, claimed: ClaimedFile, num_slots: int, slot_bytes: int) -> None:
        self._blocks, self._index = claimed.lock, claimed.index
        self._descriptors = [self._blocks, self._index]
        self.num_slots, self.slot_bytes = num_slots, slot_bytes
        # A file with slots of another size is a foreign one.
        self._owner = sha256(claimed.owner + slot_bytes.to_bytes(8, "little")).digest()
        try:
            if num_slots < 1:
                raise ValueError(
                    f"kv_offloading_disk_size (--kv-offloading-disk-size) has room for {num_slots} blocks on a rank; "
                    f"it must be at least {slot_bytes + RECORD_BYTES} bytes, one block, for each rank"
                )
            if slot_bytes < 1 or slot_bytes % ALIGNMENT:
                raise ValueError(f"slot_bytes is {slot_bytes}; it must be a positive multiple of {ALIGNMENT}")
            _resize(self._index, num_slots * RECORD_BYTES)
            _resize(self._blocks, num_slots * slot_bytes)
            _bypass_page_cache(self._blocks)
            self._records, self.stored, last = self._read_index()
            self._sequence = itertools.count(last + 1)
        except BaseException:
            self.close()
            raise

    def write(self, slot: int, key: bytes, pieces: Sequence[memoryview]) -> None:
        """Write a block to a slot. If this fails, the slot holds no block.

        Args:
            key: Digest of the block's tokens [32].
            pieces: Memory of the block's content, `slot_bytes` in all; the size and the address of each are multiples
                of `ALIGNMENT`.
        Raises:
            OSError: The disk refuses the write.
            ValueError: The file does not have this slot, or `pieces` has another size.
        """
        self._check(slot, pieces)
        self._records.pop(slot, None)
        _move(os.pwritev, self._index, [memoryview(_NO_RECORD)], slot * RECORD_BYTES)
        digest = _digest(pieces)
        _move(os.pwritev, self._blocks, pieces, slot * self.slot_bytes)
        fields = next(self._sequence), key, digest
        record = _RECORD.pack(*fields, self._seal(slot, *fields))
        _move(os.pwritev, self._index, [memoryview(record)], slot * RECORD_BYTES)
        self._records[slot] = _Record(key, digest)

    def read(self, slot: int, key: bytes, pieces: Sequence[memoryview]) -> None:
        """Read a block from a slot; arguments are as in `write`. If this fails, the memory holds any bytes.

        Raises:
            OSError: The disk refuses the read.
            DamagedBlockError: The slot does not hold the block of this key, or its content has changed on the disk.
            ValueError: The file does not have this slot, or `pieces` has another size.
        """
        self._check(slot, pieces)
        record = self._records.get(slot)
        if record is None or record.key != key:
            raise DamagedBlockError("the slot holds another block")
        _move(os.preadv, self._blocks, pieces, slot * self.slot_bytes)
        if _digest(pieces) != record.digest:
            raise DamagedBlockError("the content does not match its checksum")

    def close(self) -> None:
        """Write the page cache to the disk and release the lock."""
        with ExitStack() as stack:
            for descriptor in self._descriptors:  # The first one, which has the lock, is closed last.
                stack.callback(os.close, descriptor)
            while self._descriptors:
                os.fdatasync(self._descriptors.pop())

    def _check(self, slot: int, pieces: Sequence[memoryview]) -> None:
        num_bytes = sum(piece.nbytes for piece in pieces)
        if not 0 <= slot < self.num_slots or num_bytes != self.slot_bytes:
            raise ValueError(
                f"slot is {slot} and pieces has {num_bytes} bytes; there are {self.num_slots} slots of "
                f"{self.slot_bytes} bytes"
            )

    def _read_index(self) -> tuple[dict[int, _Record], dict[bytes, int], int]:
        """Return the valid records by slot, slots by key from the oldest to the newest, and the last number."""
        index = bytearray(self.num_slots * RECORD_BYTES)
        _move(os.preadv, self._index, [memoryview(index)], 0)
        records, numbers = {}, {}
        for slot, (number, key, digest, seal) in enumerate(_RECORD.iter_unpack(index)):
            if number and seal == self._seal(slot, number, key, digest):
                records[slot], numbers[slot] = _Record(key, digest), number
        ordered = sorted(numbers, key=numbers.__getitem__)
        slots = {records[slot].key: slot for slot in ordered}  # If slots share a key, the newest counts.
        stored = {records[slot].key: slot for slot in ordered if slots[records[slot].key] == slot}
        return records, stored, max(numbers.values(), default=0)

    def _seal(self, slot: int, number: int, key: bytes, digest: bytes) -> bytes:
        return sha256(self._owner + struct.pack("<QQ", slot, number) + key + digest).digest()


def _digest(pieces: Sequence[memoryview]) -> bytes:
    hashed = sha256()
    for piece in pieces:
        hashed.update(piece)  # releases the GIL
    return hashed.digest()


def _move(
    call: Callable[[int, Sequence[memoryview], int], int], descriptor: int, pieces: Sequence[memoryview], offset: int
) -> None:
    """Read or write all pieces, however few bytes a call moves. Python repeats calls that a signal interrupts."""
    left = list(pieces)
    while left:
        moved = call(descriptor, left[:_MAX_PIECES], offset)
        if not moved:
            raise OSError(errno.EIO, "the file ends too early")
        offset += moved
        done = 0
        while done < len(left) and moved >= left[done].nbytes:
            moved -= left[done].nbytes
            done += 1
        left = left[done:]
        if moved:
            left[0] = left[0][moved:]


def _resize(descriptor: int, num_bytes: int) -> None:
    """Give a file its size and allocate all of it, so that no later write finds the disk full."""
    before = os.fstat(descriptor).st_size
    try:
        os.ftruncate(descriptor, num_bytes)
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        os.ftruncate(descriptor, min(before, num_bytes))
        if error.errno not in _FULL:
            raise
        disk = os.fstatvfs(descriptor)
        raise ValueError(
            f"kv_offloading_disk_size (--kv-offloading-disk-size) needs {num_bytes} bytes on this rank, and its "
            f"file has {before}; the disk of kv_offloading_path (--kv-offloading-path) has "
            f"{disk.f_bavail * disk.f_frsize} bytes free ({error.strerror})"
        ) from error


def _bypass_page_cache(descriptor: int) -> None:
    """Let reads and writes bypass the page cache, which other programs need more; not on file systems without that."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        os.preadv(descriptor, [mmap.mmap(-1, ALIGNMENT)], 0)
    except OSError:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
