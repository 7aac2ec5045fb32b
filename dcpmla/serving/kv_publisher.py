"""The sockets of KV events, in a thread of the first rank: no step waits for a subscriber."""

import logging
import time
from collections import deque
from collections.abc import Sequence
from itertools import count
from queue import Empty, Full, Queue
from threading import Thread
from typing import NamedTuple

import msgspec
import zmq

from dcpmla.cache.block_events import BlockEvent
from dcpmla.serving.kv_events import EventsConfig, KVEventBatch, published

_POLL = 0.1  # seconds between two looks for requests to replay, while there are no events
_LINGER = 1000  # milliseconds that subscribers have for the last batches
_SEQUENCE_BYTES = 8
_END = (-1).to_bytes(_SEQUENCE_BYTES, "big", signed=True)  # number after the last replayed batch
_logger = logging.getLogger(__name__)


class _Step(NamedTuple):
    """The events of a step, with its number and time, and the tokens of a block."""

    number: int
    seconds: float
    events: Sequence[BlockEvent]
    block_tokens: int


class EventPublisher:
    """A PUB socket for the batches of events, and a ROUTER socket that sends the last ones again.

    A message is [topic, number in 8 bytes, batch]. A batch that is dropped leaves a gap in the numbers. A request to
    replay is [number of the first batch]; its answer is a message for each batch that is kept, then one with the number
    -1.

    Args:
        config: Config with events enabled.
    Attributes:
        address: Address of the PUB socket, as ZeroMQ has bound or connected it.
    Raises:
        ValueError: ZeroMQ cannot bind or connect an address.
    """

    def __init__(self, config: EventsConfig) -> None:
        self._config = config
        self._numbers, self._num_sent, self._num_dropped = count(), 0, 0
        self._queue = Queue[_Step | None](config.max_queue_size)
        self._kept = deque[tuple[bytes, bytes]](maxlen=config.buffer_steps)
        self._context = zmq.Context()
        self._events, self._replays = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        self._events.set_hwm(config.hwm)
        self._replays.set_hwm(2 * (config.buffer_steps + 1))  # All kept batches fit, also while acknowledgements lag.
        try:
            _open(self._events, "endpoint", config.endpoint, _is_here(config.endpoint))
            if config.replay_endpoint is not None:
                _open(self._replays, "replay_endpoint", config.replay_endpoint, binds=True)
        except ValueError:
            self._context.destroy(linger=0)
            raise
        self.address = self._events.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread = Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[BlockEvent], block_tokens: int) -> None:
        """Queue a step's events, or drop them if the queue is full.

        Args:
            block_tokens: Tokens of a block, over all DCP ranks.
        """
        if not events:
            return
        try:
            self._queue.put_nowait(_Step(next(self._numbers), time.time(), events, block_tokens))
        except Full:
            self._num_dropped += 1

    def totals(self) -> dict[tuple[str, ...], float]:
        """Return the totals of batches, for `Report.totals`."""
        return {("kv_event_batches", "sent"): self._num_sent, ("kv_event_batches", "dropped"): self._num_dropped}

    def close(self) -> None:
        """Send what is queued, and close the sockets."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        encode, topic = msgspec.msgpack.Encoder().encode, self._config.topic.encode()
        while True:
            if self._replays.poll(0):
                self._replay(self._replays.recv_multipart(), topic)
            try:
                step = self._queue.get(timeout=_POLL)
            except Empty:
                continue
            if step is None:
                break
            batch = KVEventBatch(step.seconds, [*published(step.events, step.block_tokens)], 0)
            number, body = step.number.to_bytes(_SEQUENCE_BYTES, "big"), encode(batch)
            self._events.send_multipart([topic, number, body])  # A PUB socket never waits.
            self._kept.append((number, body))
            self._num_sent += 1
        self._context.destroy(linger=_LINGER)

    def _replay(self, request: Sequence[bytes], topic: bytes) -> None:
        """Send the batches from a number on that are kept; a ROUTER socket never waits either."""
        client, *frames = request
        if len(frames) != 2 or len(frames[1]) != _SEQUENCE_BYTES:
            _logger.warning("a request to replay KV events is ignored: it has to be an empty frame and 8 bytes")
            return
        for number, body in self._kept:
            if number >= frames[1]:
                self._replays.send_multipart([client, b"", topic, number, body])
        self._replays.send_multipart([client, b"", b"", _END, b""])


def _open(socket: "zmq.Socket[bytes]", field: str, endpoint: str, binds: bool) -> None:
    """Bind or connect an address of the config.

    Raises:
        ValueError: ZeroMQ cannot.
    """
    try:
        (socket.bind if binds else socket.connect)(endpoint)
    except zmq.ZMQError as error:
        verb = "bind" if binds else "connect"
        raise ValueError(
            f"{field} of kv_events_config (--kv-events-config) is {endpoint!r}, which ZeroMQ cannot {verb}: {error}; "
            "give an address such as tcp://*:5557"
        ) from error


def _is_here(endpoint: str) -> bool:
    """Return whether subscribers connect to an address, as vLLM decides it."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://")
