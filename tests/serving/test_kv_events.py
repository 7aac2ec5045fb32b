"""KV events in vLLM's format, and sockets that never wait."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from dcpmla.cache.block_events import HOST, Cleared, Removed, Stored
from dcpmla.serving.kv_events import EventsConfig, KVEventBatch, published
from tests.support.launchers import free_port
from tests.support.waiting import wait_until

zmq = pytest.importorskip("zmq")
from dcpmla.serving.kv_publisher import EventPublisher  # noqa: E402
from tests.support.kv_router import (  # noqa: E402
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    numbers_of,
    until_the_end,
)


def stored(number: int) -> Stored:
    return Stored([number.to_bytes(32, "big")], None, [number] * 4096)


def test_the_format() -> None:
    """Byte for byte what msgspec makes of vLLM's structs."""
    key, parent = bytes(range(32)), bytes(range(1, 33))
    low, before = (int.from_bytes(each[-8:], "big") for each in (key, parent))
    events = [Stored([key], parent, [5, 6], "s"), Removed(key), Removed(parent), Removed(key, HOST), Cleared()]
    events.insert(1, Stored([parent], None, [1, 2], medium=HOST))
    expected = Batch(
        1.5,
        [
            BlockStored([low], before, [5, 6], 2, None, "GPU", None, None, 0, "mla_attention"),
            BlockStored([before], None, [1, 2], 2, None, "CPU", None, None, 0, "mla_attention"),
            BlockRemoved([low, before], "GPU", 0),
            BlockRemoved([low], "CPU", 0),
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
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.connect(replay)
        client.send_multipart([b"", bytes(8)])
        assert numbers_of([frames[1:] for frames in until_the_end(client)]) == [0, 1, 5]
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
        messages = until_the_end(client)
    assert [frames[:2] for frames in messages] == [[b"", b"t"]] * 3
    assert numbers_of([frames[1:] for frames in messages]) == [3, 4, 5]
    publisher.close()


def test_addresses_that_are_taken_are_refused(tmp_path: Path) -> None:
    port = free_port()
    config = EventsConfig(endpoint=f"tcp://*:{port}")
    publisher = EventPublisher(config)
    assert publisher.address == f"tcp://0.0.0.0:{port}"
    with pytest.raises(ValueError, match=rf"endpoint of kv_events_config .* is 'tcp://\*:{port}', which ZeroMQ cannot"):
        EventPublisher(config)
    publisher.close()
    other = EventsConfig(endpoint="ipc:///nowhere/at/all", replay_endpoint="x")
    with pytest.raises(ValueError, match="cannot bind"):
        EventPublisher(other)
