"""Staging memory: slots with tags at both ends, which reveal a reused slot (`Staging`), and their sizes."""

import math
from collections import Counter
from hashlib import sha256

import numpy as np
import torch
from torch import Tensor

from dcpmla.upload import upload

MOST_SLOTS = 4  # slots of a rank that hold parts of one transfer
NUM_SLOTS = 2 * MOST_SLOTS  # slots of a rank: an engine holds half of them at most
_MOST_BYTES, _MOST_SHARE = 1 << 30, 1 / 64  # largest staging memory of a rank, and largest share of a device's memory
_LEAST_BYTES = 1 << 20  # smallest slot
# Time of a slot's messages, polls and launches, without the copies: each end of a transfer on one H200 worked for 0.7
# to 0.8 ms on a part of 16 MiB.
_CYCLE_SECONDS = 1e-3
_TAG_BYTES = 16
TAGS_BYTES = 2 * _TAG_BYTES  # Each slot has a tag at both ends.


def slot_size(gb_per_s: float, memory_bytes: int) -> int:
    """Return the bytes of each of NUM_SLOTS slots. The slots of one transfer keep a link busy.

    These slots hold what the link moves in the time of a slot's cycle. Their size is a power of two; all slots take at
    most 1 GiB together, and at most a 64th of the device's memory.

    Args:
        gb_per_s: Rate of the link, GB/s.
        memory_bytes: Memory of the device.
    """
    wanted = max(_LEAST_BYTES, gb_per_s * 1e9 * _CYCLE_SECONDS / MOST_SLOTS)
    most = max(_LEAST_BYTES, min(_MOST_BYTES, memory_bytes * _MOST_SHARE) / NUM_SLOTS)
    return min(1 << math.ceil(math.log2(wanted)), 1 << math.floor(math.log2(most)))


def allocate_staging(device: torch.device, num_slots: int, slot_bytes: int) -> Tensor:
    """Return staging memory [num_slots, slot_bytes] uint8 for a transport.

    Raises:
        ValueError: A slot has no room for content between its tags, or is no multiple of 16 bytes.
    """
    if num_slots < 1:
        raise ValueError(f"num_slots is {num_slots}; it must be at least 1")
    if slot_bytes <= TAGS_BYTES or slot_bytes % _TAG_BYTES:
        raise ValueError(f"slot_bytes is {slot_bytes}; it must be a multiple of {_TAG_BYTES} above {TAGS_BYTES}")
    return torch.zeros(num_slots, slot_bytes, dtype=torch.uint8, device=device)


def make_tag(handoff: str, number: int) -> bytes:
    """Return the tag [16] of a slot's content. `number` differs for all contents of a rank's slots."""
    return sha256(handoff.encode()).digest()[:8] + number.to_bytes(8, "little")


class Staging:
    """The slots of a transport's memory. One thread uses it.

    One engine never holds more slots than are free, so a stopped engine leaves room for others.

    Args:
        memory: Memory [num_slots, slot_bytes] uint8.
    Attributes:
        part_bytes: Most bytes of content in a slot.
    """

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._free = list(reversed(range(len(memory))))
        self._holders: dict[int, str] = {}
        self._num_held: Counter[str] = Counter()
        self.part_bytes = memory.shape[1] - TAGS_BYTES

    def take(self, engine: str) -> int | None:
        """Return a free slot for a transfer with an engine; None if it must wait."""
        if self._num_held[engine] >= len(self._free):
            return None
        slot = self._free.pop()
        self._holders[slot] = engine
        self._num_held[engine] += 1
        return slot

    def free(self, slot: int) -> None:
        """Return a slot. The next content is written by later work on the stream that wrote or read this one."""
        engine = self._holders.pop(slot)
        self._num_held[engine] -= 1
        if not self._num_held[engine]:
            del self._num_held[engine]
        self._free.append(slot)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def content(self, slot: int, num_bytes: int) -> Tensor:
        """Return the memory [num_bytes] uint8 of a slot's content, which is aligned to 16 bytes."""
        return self._memory[slot, _TAG_BYTES : _TAG_BYTES + num_bytes]

    def write_tags(self, slot: int, num_bytes: int, tag: bytes) -> None:
        """Write a tag to both ends of a slot's content, on the current stream."""
        (tag_there,) = upload([np.frombuffer(bytearray(tag), dtype=np.uint8)], self._memory.device)
        self._tags(slot, num_bytes).copy_(tag_there)

    def read_tags(self, slot: int, num_bytes: int) -> Tensor:
        """Return the tags of a slot [2, 16] uint8 on the host; they are valid after the current work of the stream."""
        there = self._tags(slot, num_bytes)
        tags = torch.empty(there.shape, dtype=torch.uint8, pin_memory=there.device.type == "cuda")
        return tags.copy_(there, non_blocking=True)

    def _tags(self, slot: int, num_bytes: int) -> Tensor:
        row = self._memory[slot, : num_bytes + TAGS_BYTES]
        return row.unfold(0, _TAG_BYTES, _TAG_BYTES + num_bytes)


def tags_match(tags: Tensor, tag: bytes) -> bool:
    """Return whether both tags of a slot's content (`Staging.read_tags`) are this one."""
    return tags.numpy().tobytes() == 2 * tag
