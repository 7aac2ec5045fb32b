"""KV events: what a router learns of a server's cache, in vLLM's format, and sockets that never wait."""

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import httpx2
import msgspec
import pytest

from dcpmla.cache.block_events import Cleared, Removed, Stored
from dcpmla.serving.kv_events import EventsConfig, KVEventBatch, published
from tests.support.launchers import free_port
from tests.support.servers import AUTHORIZED, KEY, RunningServer, serve
from tests.support.waiting import LATE, wait_until

zmq = pytest.importorskip("zmq")
from dcpmla.serving.kv_publisher import EventPublisher  # noqa: E402

BLOCK = 32  # tokens, over two ranks
NUM_BLOCKS = 6  # of a prompt
CACHE_BYTES = 1 << 18
TOPIC = "kv@needle"
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


class Router:
    """A subscriber that follows one server's cache.

    Attributes:
        blocks: Hash, parent's hash, tokens and salt of each block that the server has.
        frames: Messages, as they came.
        num_stored: Events of each block so far.
    """

    def __init__(self, port: int, replay_port: int) -> None:
        self._context = zmq.Context()
        self._events, self._replays = self._context.socket(zmq.SUB), self._context.socket(zmq.DEALER)
        self._events.setsockopt_string(zmq.SUBSCRIBE, TOPIC)
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
                assert (event.block_size, event.medium, event.group_idx) == (BLOCK, "GPU", 0)
                assert event.kv_cache_spec_kind == "mla_attention"
                assert len(event.token_ids) == BLOCK * len(event.block_hashes)
                parent = event.parent_block_hash
                assert parent is None or parent in self.blocks
                keys = event.extra_keys or [None] * len(event.block_hashes)
                for index, (each, key) in enumerate(zip(event.block_hashes, keys, strict=True)):
                    assert each not in self.blocks, "it was stored already"
                    self.blocks[each] = parent, event.token_ids[index * BLOCK : (index + 1) * BLOCK], key
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
        for start in range(0, (len(token_ids) - 1) // BLOCK * BLOCK, BLOCK):
            wanted = found[-1], list(token_ids[start : start + BLOCK]), (salt,) if salt and not start else None
            match = [each for each, block in self.blocks.items() if (block[0], block[1], block[2] or None) == wanted]
            if not match:
                break
            found += match
        return found[1:]

    def replay(self, first: int) -> list[list[bytes]]:
        """Ask for the batches from a number on."""
        self._replays.send_multipart([b"", first.to_bytes(8, "big")])
        messages: list[list[bytes]] = []
        while not messages or messages[-1][2] != END:
            assert self._replays.poll(1000 * LATE), "the replay does not end"
            messages.append(self._replays.recv_multipart())
        assert messages.pop() == [b"", b"", END, b""]
        return [message[1:] for message in messages]


@pytest.fixture(scope="module")
def ports() -> tuple[int, int]:
    return free_port(), free_port()


@pytest.fixture(scope="module")
def publishing(
    model: Path, ports: tuple[int, int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """Serve with a cache of few blocks."""
    endpoint, replay = (f"tcp://*:{port}" for port in ports)
    config = {"enable_kv_cache_events": True, "endpoint": endpoint, "replay_endpoint": replay, "topic": TOPIC}
    options = ["--api-key", KEY, "--dtype", "float32", "--max-model-len", 1024, "--kv-cache-memory-bytes", CACHE_BYTES]
    directory = tmp_path_factory.mktemp("publishing")
    with serve(directory, model, 2, *options, "--kv-events-config", json.dumps(config)) as running:
        yield running


@pytest.fixture
def router(ports: tuple[int, int]) -> Iterator[Router]:
    router = Router(*ports)
    yield router
    router.close()


def prompt_of(number: int) -> list[int]:
    """Return the tokens of a prompt that begins as no other one."""
    return Random(number).choices(range(100), k=NUM_BLOCKS * BLOCK + 5)


def stored(number: int) -> Stored:
    return Stored([number.to_bytes(32, "big")], None, [number] * 4096)


def numbers_of(frames: Sequence[Sequence[bytes]]) -> list[int]:
    return [int.from_bytes(each[1], "big") for each in frames]


def test_a_router_knows_what_a_server_has(publishing: RunningServer, router: Router) -> None:
    """It predicts how many tokens each request finds, over evictions."""
    client = httpx2.Client(base_url=publishing.url, headers=AUTHORIZED, timeout=LATE)

    def ask(prompt: Sequence[int], salt: str = "") -> int:
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, **({"cache_salt": salt} if salt else {})}
        usage = client.post("/v1/completions", json=body).json()["usage"]
        cached: int = usage["prompt_tokens_details"]["cached_tokens"]
        return cached

    def ask_and_follow(prompt: Sequence[int], salt: str = "") -> int:
        """Ask, and wait for the event of the prompt's last block."""
        num_cached = ask(prompt, salt)

        def has_come() -> bool:
            router.receive()
            router.take_all()
            return len(router.find(prompt, salt)) == NUM_BLOCKS

        wait_until(has_come, "the blocks of a prompt have no event")
        return num_cached

    # A subscription takes a moment. What came before it is replayed.
    early = 1000
    while not router.frames:
        ask(prompt_of(early := early + 1))
        router.receive(200)
    router.frames[:0] = router.replay(0)[: numbers_of(router.frames)[0]]

    first = prompt_of(1)
    assert ask_and_follow(first) == 0
    found = router.find(first)
    assert len(found) == NUM_BLOCKS
    before = len(router.events)
    assert ask_and_follow(first) == NUM_BLOCKS * BLOCK
    assert ask_and_follow(first, "secret") == 0
    stored = [event for event in router.events[before:] if isinstance(event, BlockStored)]
    assert len(router.find(first, "secret")) == NUM_BLOCKS, "a salt makes other blocks"
    assert [event.extra_keys for event in stored] == [[("secret",), *[None] * (NUM_BLOCKS - 1)]]
    assert all(router.num_stored[each] == 1 for each in found), "a second request stores nothing"

    other = 2
    while any(each in router.blocks for each in found):
        prompt = prompt_of(other := other + 1)
        assert router.find(prompt) == []
        assert ask_and_follow(prompt) == 0
    assert ask_and_follow(first) == 0, "all of it was removed"
    assert router.find(first) == found
    assert [router.num_stored[each] for each in found] == [2] * NUM_BLOCKS
    predicted = set[int]()
    for number in range(other - 8, other + 1):
        prompt = prompt_of(number)
        predicted.add(num_found := len(router.find(prompt)))
        assert ask_and_follow(prompt) == BLOCK * num_found
    assert {0, NUM_BLOCKS} < predicted, "whole, gone, and in part"

    assert [frames[0] for frames in router.frames] == [TOPIC.encode()] * len(router.frames)
    assert numbers_of(router.frames) == list(range(len(router.frames)))
    router.receive()
    assert router.replay(0) == router.frames
    assert router.replay(7) == router.frames[7:]
    batch = msgspec.msgpack.decode(router.frames[-1][2])
    assert abs(batch[0] - time.time()) < 1000
    assert batch[2] == 0
    assert publishing.metric('kv_event_batches_total{outcome="dropped"}') == 0


def test_the_format() -> None:
    """Byte for byte what msgspec makes of vLLM's structs."""
    key, parent = bytes(range(32)), bytes(range(1, 33))
    low, before = (int.from_bytes(each[-8:], "big") for each in (key, parent))
    events = [Stored([key], parent, [5, 6], "s"), Removed(key), Removed(parent), Cleared()]
    expected = Batch(
        1.5,
        [
            BlockStored([low], before, [5, 6], 2, None, "GPU", None, None, 0, "mla_attention"),
            BlockRemoved([low, before], "GPU", 0),
            AllBlocksCleared(),
        ],
        0,
    )
    batch = msgspec.msgpack.encode(KVEventBatch(1.5, [*published(events, 2)], 0))
    assert batch == msgspec.msgpack.encode(expected)
    assert msgspec.msgpack.decode(batch)[1][0]["type"] == "BlockStored"
    (begin,) = published([Stored([key, parent], None, [1, 2, 3, 4], "s")], 2)
    assert (begin.parent_block_hash, begin.extra_keys) == (None, [("s",), None])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "give an object such as"),
        ("[]", "Expected `object`, got `array`"),
        ('{"publisher": "kafka"}', "Invalid enum value 'kafka'"),
        ('{"buffer_steps": 0}', "buffer_steps"),
        ('{"topics": ""}', "unknown field `topics`"),
    ],
)
def test_configs_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EventsConfig.read(text)


def test_configs_that_publish_nothing() -> None:
    given = {"{}": False, '{"enable_kv_cache_events": true}': True}
    given['{"enable_kv_cache_events": true, "publisher": "null"}'] = False
    assert {text: EventsConfig.read(text).is_enabled for text in given} == given


def test_a_full_queue_drops_batches_and_counts_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The numbers of the others show the gap."""
    threads: list[Any] = []
    monkeypatch.setattr("dcpmla.serving.kv_publisher.Thread.start", lambda thread: threads.append(thread))
    replay = f"ipc://{tmp_path}/replay"
    config = EventsConfig(endpoint=f"ipc://{tmp_path}/events", replay_endpoint=replay, max_queue_size=2)
    publisher = EventPublisher(config)
    publisher.publish([], 4096)
    for number in range(5):
        publisher.publish([stored(number)], 4096)
    assert publisher.totals() == {("kv_event_batches", "sent"): 0, ("kv_event_batches", "dropped"): 3}
    monkeypatch.undo()
    threads[0].start()
    wait_until(lambda: publisher.totals()["kv_event_batches", "sent"] == 2, "the queue is not sent")
    publisher.publish([stored(5)], 4096)
    wait_until(lambda: publisher.totals()["kv_event_batches", "sent"] == 3, "the queue is not sent")
    with zmq.Context() as context, context.socket(zmq.REQ) as request:
        request.connect(replay)
        request.send(bytes(8))
        assert request.poll(1000 * LATE)
        assert int.from_bytes(request.recv_multipart()[1], "big") == 0
    publisher.close()


def test_a_subscriber_that_does_not_read_holds_nobody_up(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    publisher = EventPublisher(EventsConfig(endpoint=endpoint, hwm=1, buffer_steps=10))
    with zmq.Context() as context, context.socket(zmq.SUB) as slow:
        slow.setsockopt(zmq.RCVHWM, 1)
        slow.setsockopt(zmq.SUBSCRIBE, b"")
        slow.connect(endpoint)
        number = 0
        while not slow.poll(50):
            publisher.publish([stored(number := number + 1)], 4096)
        start = number
        for number in range(start + 1, start + 2001):
            publisher.publish([stored(number)], 4096)
        wait_until(lambda: publisher.totals()["kv_event_batches", "sent"] == start + 2000, "the publisher waits")
    assert publisher.totals()["kv_event_batches", "dropped"] == 0
    publisher.close()


def test_a_replay_has_the_last_batches_and_strange_requests_are_ignored(tmp_path: Path) -> None:
    replay = f"ipc://{tmp_path}/replay"
    publisher = EventPublisher(
        EventsConfig(endpoint=f"ipc://{tmp_path}/events", replay_endpoint=replay, buffer_steps=3, topic="t")
    )
    for number in range(6):
        publisher.publish([stored(number)], 4096)
    wait_until(lambda: publisher.totals()["kv_event_batches", "sent"] == 6, "the queue is not sent")
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.connect(replay)
        for frames in ([b""], [b"x"], [b"", b"1234567"], [b"", b"", bytes(8)], [b"", bytes(8)]):
            client.send_multipart(frames)
        messages: list[list[bytes]] = []
        while not messages or messages[-1][2] != END:
            assert client.poll(1000 * LATE)
            messages.append(client.recv_multipart())
    assert [frames[:2] for frames in messages] == [[b"", b"t"]] * 3 + [[b"", b""]]
    assert numbers_of([frames[1:] for frames in messages[:-1]]) == [3, 4, 5]
    publisher.close()


def test_addresses_that_are_taken_are_refused(tmp_path: Path) -> None:
    port = free_port()
    config = EventsConfig(endpoint=f"tcp://*:{port}")
    publisher = EventPublisher(config)
    with pytest.raises(ValueError, match=rf"endpoint of kv_events_config .* is 'tcp://\*:{port}', which ZeroMQ cannot"):
        EventPublisher(config)
    publisher.close()
    other = EventsConfig(endpoint="ipc:///nowhere/at/all", replay_endpoint="x")
    with pytest.raises(ValueError, match="cannot bind"):
        EventPublisher(other)
