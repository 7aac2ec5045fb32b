"""A subscriber to KV events, in the place of a router: its structs are declared as vLLM 0.33 declares them."""

from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from tests.support.waiting import LATE

BLOCK_TOKENS = 32  # over two ranks
END = (-1).to_bytes(8, "big", signed=True)


# As vLLM 0.33 declares them; fields that are never published here are left out.
class Event(msgspec.Struct, omit_defaults=True, tag=True):
    pass


class BlockStored(Event):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(Event):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(Event):
    pass


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def until_the_end(client: Any) -> list[list[bytes]]:
    """Receive the messages of a replay."""
    messages: list[list[bytes]] = []
    while not messages or messages[-1][2] != END:
        assert client.poll(1000 * LATE), "the replay does not end"
        messages.append(client.recv_multipart())
    assert messages.pop() == [b"", b"", END, b""]
    return messages


class Router:
    """A subscriber that follows one server's cache.

    Args:
        port, replay_port: Ports of its two endpoints on this host.

    Attributes:
        blocks: Hash, parent's hash, tokens and salt of each block that the server has.
        frames: Messages, as they came.
        num_stored: Events of each block so far.
    """

    def __init__(self, port: int, replay_port: int, topic: str) -> None:
        self._context = zmq.Context()
        self._events, self._replays = self._context.socket(zmq.SUB), self._context.socket(zmq.DEALER)
        self._events.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._events.connect(f"tcp://127.0.0.1:{port}")
        self._replays.connect(f"tcp://127.0.0.1:{replay_port}")
        self.blocks: dict[Any, tuple[Any, list[int], Any]] = {}
        self.num_stored: dict[Any, int] = {}
        self.frames: list[list[bytes]] = []
        self.events: list[Any] = []
        self._num_taken = 0  # frames

    def close(self) -> None:
        self._context.destroy(linger=0)

    def receive(self, milliseconds: int = 0) -> None:
        """Receive the messages that have come."""
        while self._events.poll(milliseconds):
            self.frames.append(self._events.recv_multipart())

    def take_all(self) -> None:
        """Take the events of the messages received."""
        for frames in self.frames[self._num_taken :]:
            for event in msgspec.msgpack.decode(frames[2], type=Batch).events:
                self.take(event)
        self._num_taken = len(self.frames)

    def take(self, event: Any) -> None:
        self.events.append(event)
        match event:
            case BlockStored():
                assert (event.block_size, event.medium, event.group_idx) == (BLOCK_TOKENS, "GPU", 0)
                assert event.kv_cache_spec_kind == "mla_attention"
                assert len(event.token_ids) == BLOCK_TOKENS * len(event.block_hashes)
                parent = event.parent_block_hash
                assert parent is None or parent in self.blocks
                keys = event.extra_keys or [None] * len(event.block_hashes)
                for index, (each, key) in enumerate(zip(event.block_hashes, keys, strict=True)):
                    assert each not in self.blocks, "it was stored already"
                    self.blocks[each] = parent, event.token_ids[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS], key
                    self.num_stored[each] = self.num_stored.get(each, 0) + 1
                    parent = each
            case BlockRemoved():
                assert (event.medium, event.group_idx) == ("GPU", 0)
                for each in event.block_hashes:
                    del self.blocks[each]
            case _:
                self.blocks.clear()

    def find(self, token_ids: Sequence[int], salt: str = "") -> list[Any]:
        """Return the hashes of the blocks that a request finds: its last token is always computed."""
        found: list[Any] = [None]
        for start in range(0, (len(token_ids) - 1) // BLOCK_TOKENS * BLOCK_TOKENS, BLOCK_TOKENS):
            wanted = found[-1], list(token_ids[start : start + BLOCK_TOKENS]), (salt,) if salt and not start else None
            match = [each for each, block in self.blocks.items() if (block[0], block[1], block[2] or None) == wanted]
            if not match:
                break
            found += match
        return found[1:]

    def replay(self, first: int) -> list[list[bytes]]:
        """Ask for the batches from a number on."""
        self._replays.send_multipart([b"", first.to_bytes(8, "big")])
        return [message[1:] for message in until_the_end(self._replays)]


def numbers_of(frames: Sequence[Sequence[bytes]]) -> list[int]:
    return [int.from_bytes(each[1], "big") for each in frames]
