"""KV events as vLLM 0.33 publishes them: the prefixes that a server's cache has, for routers that send requests there.

Batches travel as msgpack. Names, tags and defaults are vLLM's: vllm/distributed/kv_events.py, vllm/config/kv_events.py.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Annotated, Literal, Self

import msgspec

from dcpmla.cache.block_events import BlockEvent, Removed, Stored

_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
_KIND = "mla_attention"


class EventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The JSON object of `--kv-events-config`.

    Attributes:
        enable_kv_cache_events: Whether events are published.
        publisher: "zmq", or "null" to publish none; by default what enable_kv_cache_events asks for.
        endpoint: ZeroMQ address of a PUB socket, which is bound if it has a * or ::, or begins with ipc://, and
            connected otherwise.
        replay_endpoint: Address of a ROUTER socket that sends the last batches again; None without.
        buffer_steps: Number of batches that it keeps.
        hwm: Limit of batches that wait for one subscriber; it misses later ones.
        max_queue_size: Limit of batches that wait to be published; later ones are dropped.
        topic: First frame of each message, to which subscribers subscribe.
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: _Count = 10_000
    hwm: _Count = 100_000
    max_queue_size: _Count = 100_000
    topic: str = ""

    @classmethod
    def read(cls, text: str) -> Self:
        """Return the config of a JSON text.

        Raises:
            ValueError: It is no JSON object with these fields, or a value is not allowed.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            example = '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}'
            raise ValueError(f"{text!r}: {error}; give an object such as {example}") from error

    @property
    def is_enabled(self) -> bool:
        """Return whether events are published."""
        return self.enable_kv_cache_events and self.publisher != "null"


class _Event(msgspec.Struct, omit_defaults=True, tag=True):
    """An event with the name of its class."""


class BlockStored(_Event):
    """Neighbouring blocks of a sequence that requests can reuse from now on.

    Attributes:
        medium: Memory that has them, "GPU" or "CPU".
        block_hashes: Lowest 64 bits of the blocks' keys.
        parent_block_hash: Hash of the block before them, None if they begin a sequence.
        token_ids: Tokens of all blocks.
        block_size: Tokens of a block, over all DCP ranks.
        extra_keys: What requests need besides the tokens to find each block: the salt, in a sequence's first block.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: Sequence[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(_Event):
    """Blocks that have left a medium."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(_Event):
    """The end of all blocks."""


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """The events of a step.

    Attributes:
        ts: Seconds since 1970.
        data_parallel_rank: Index of the server among replicas that vLLM runs as one.
    """

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def published(
    events: Iterable[BlockEvent], block_tokens: int
) -> Iterator[BlockStored | BlockRemoved | AllBlocksCleared]:
    """Yield events as they are published; neighbouring removals from a medium are one event.

    Args:
        block_tokens: Tokens of a block, over all DCP ranks.
    """
    for medium, group in groupby(events, lambda event: event.medium if isinstance(event, Removed) else None):
        if medium is not None:
            yield BlockRemoved([_hash(event.key) for event in group if isinstance(event, Removed)], medium, 0)
            continue
        for event in group:
            yield _stored(event, block_tokens) if isinstance(event, Stored) else AllBlocksCleared()


def _stored(event: Stored, block_tokens: int) -> BlockStored:
    hashes, begins = [*map(_hash, event.keys)], event.previous is None
    salts: list[tuple[str, ...] | None] | None = None
    if event.cache_salt and begins:
        salts = [(event.cache_salt,), *[None] * (len(hashes) - 1)]
    parent = None if event.previous is None else _hash(event.previous)
    return BlockStored(hashes, parent, event.token_ids, block_tokens, None, event.medium, None, salts, 0, _KIND)


def _hash(key: bytes) -> int:
    return int.from_bytes(key[-8:], "big")
