"""Blocks for files on disks: memory that direct reads and writes take, random content, keys as block_key makes them."""

import mmap
from hashlib import sha256
from pathlib import Path
from random import Random

from dcpmla.cache.disk_file import BlockFile
from dcpmla.cache.disk_folder import DiskFolder

PIECE_BYTES = (4096, 12288, 4096)  # A block has pieces of several sizes.
SLOT_BYTES = sum(PIECE_BYTES)
IDENTITY = {"model": "d1", "kv_cache_dtype": "auto", "layout": "tp 2, dcp 2, interleave 16"}


def key_of(number: int) -> bytes:
    return sha256(number.to_bytes(8, "little")).digest()


def content_of(number: int) -> bytes:
    return Random(number).randbytes(SLOT_BYTES)


def pieces_of(content: bytes = bytes(SLOT_BYTES)) -> list[memoryview]:
    """Memory of a block with this content, in aligned pieces whose addresses decrease."""
    memory = mmap.mmap(-1, 2 * SLOT_BYTES)
    pieces, end = [], 2 * SLOT_BYTES
    for start, size in zip((0, 4096, 16384), PIECE_BYTES, strict=True):
        piece = memoryview(memory)[end - size : end]
        piece[:] = content[start : start + size]
        pieces.append(piece)
        end -= size + 4096
    return pieces


def bytes_of(pieces: list[memoryview]) -> bytes:
    return b"".join(pieces)


def open_file(directory: Path, num_slots: int = 4) -> BlockFile:
    return BlockFile(DiskFolder(directory, IDENTITY).claim(0), num_slots, SLOT_BYTES)


def read_slot(file: BlockFile, slot: int, key: bytes) -> bytes:
    pieces = pieces_of()
    file.read(slot, key, pieces)
    return bytes_of(pieces)
