"""Jobs that hand requests over through fake transports, polled one rank at a time in a random order."""

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dcpmla.transfer.incoming import Incoming
from dcpmla.transfer.layout import CacheLayout
from dcpmla.transfer.outgoing import Outgoing
from dcpmla.transfer.transport import Peer, rank_name
from tests.support.fake_transport import Clock, Network
from tests.support.plain_cache import Content, PlainCache

LEASE, SILENCE = 40.0, 12.0  # seconds of the virtual clock
MOST_TOKENS = 40
NUM_BLOCKS, NUM_STATES = 3 * MOST_TOKENS, 8


class StillWorker:
    """A worker without a thread: the test polls."""

    def __init__(self, name: str, device: torch.device, poll: Any, fail: Any) -> None:
        self._poll, self._fail = poll, fail

    def start(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None:
        self._poll()


def still_transfers(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Replace the threads and the time of all transfers."""
    clock = Clock()
    monkeypatch.setattr("dcpmla.transfer.side.Worker", StillWorker)
    for module in ("outcome", "served", "side", "outgoing", "incoming"):  # those that look at the time
        monkeypatch.setattr(f"dcpmla.transfer.{module}.time", clock)
    return clock


class Job:
    """A job: the caches and ends of its ranks. Blocks and states are allocated alike on all ranks."""

    def __init__(
        self, kind: type[Outgoing | Incoming], engine: str, layout: CacheLayout, network: Network, num_slots: int
    ) -> None:
        self.engine, self.layout, self.network = engine, layout, network
        self.names = [rank_name(engine, rank) for rank in range(layout.tp_size)]
        slot_bytes = 16 * network.random.randint(4, 12)
        transports = [network.new(name, num_slots, slot_bytes) for name in self.names]
        self.caches = [PlainCache(layout, rank, NUM_BLOCKS, NUM_STATES) for rank in range(layout.tp_size)]
        limits = {"lease": LEASE} if kind is Outgoing else {"silence": SILENCE}
        self.sides = [
            kind(transport, self.caches[rank].mover, layout, rank, **limits)
            for rank, transport in enumerate(transports)
        ]
        self.peer = Peer(engine, layout, [transport.metadata() for transport in transports])
        self.free_blocks, self.free_states = list(range(NUM_BLOCKS)), list(range(NUM_STATES))
        self._guarded: dict[int, list[list[torch.Tensor]]] = {}
        self.stopped = False

    def poll(self, rank: int) -> None:
        if not self.stopped and self.names[rank] not in self.network.lost:
            self.sides[rank].poll()

    def take(self, num_tokens: int) -> tuple[list[int], int] | None:
        """Return free blocks and a state for a prompt; None if too few are free."""
        num_blocks = -(-num_tokens // self.layout.tokens[0].per_block)
        if len(self.free_blocks) < num_blocks or not self.free_states:
            return None
        self.network.random.shuffle(self.free_blocks)
        self.check_free_blocks()
        blocks = [self.free_blocks.pop() for _ in range(num_blocks)]
        for block in blocks:
            self._guarded.pop(block, None)
        return blocks, self.free_states.pop()

    def check_free_blocks(self) -> None:
        """Check that nothing was written to blocks since they were free."""
        for block, contents in self._guarded.items():
            for cache, content in zip(self.caches, contents, strict=True):
                assert all(map(torch.equal, cache.read([block]), content))

    def release(self, blocks: list[int], state: int) -> None:
        """Overwrite blocks and a state, as the next request does."""
        for cache in self.caches:
            cache.overwrite(blocks, state)
        for block in blocks:
            self._guarded[block] = [cache.read([block]) for cache in self.caches]
        self.free_blocks += blocks
        self.free_states.append(state)


def connect(prefill: Job, decode: Job) -> None:
    """Connect all ranks of two jobs."""
    for side in prefill.sides:
        side.connect(decode.peer)
    for side in decode.sides:
        side.connect(prefill.peer)


class Prompt:
    """A prompt: the rows of its positions, its state, and where both jobs have it."""

    def __init__(self, name: str, prefill: Job, decode: Job, random: Random) -> None:
        self.name, self.prefill, self.decode, self.random = name, prefill, decode, random
        self.content = Content.of(prefill.layout, random.getrandbits(32), MOST_TOKENS)
        self.num_tokens = self.content.num_tokens
        self.start = random.choice([0, 0, random.randint(0, self.num_tokens)])
        self.num_computed, self.is_finished = 0, False
        self.sent: SimpleNamespace | None = None  # handoffs, blocks, state
        self.got: SimpleNamespace | None = None  # arrivals, blocks, state
        self.is_sent = self.is_got = self.has_arrived = False
        self.handoffs: list[Any] | None = None

    # What the prefill server's engine does.

    def compute(self) -> None:
        """Compute some tokens, in blocks that are allocated first."""
        if self.sent is None:
            taken = self.prefill.take(self.num_tokens)
            if taken is None:
                return
            self.sent = SimpleNamespace(blocks=taken[0], state=taken[1])
        if self.handoffs is None:
            self.handoffs = [side.begin(self.name) for side in self.prefill.sides]
        end = min(self.num_tokens, self.num_computed + self.random.randint(1, 20))
        for cache in self.prefill.caches:
            cache.fill(self.content, self.sent.blocks, self.num_computed, end)
        self.num_computed = end
        for handoff in self.handoffs:
            handoff.computed(self.sent.blocks, end)
            self._poll_some()

    def finish(self) -> None:
        self.is_finished = True
        for cache, handoff in zip(self.prefill.caches, self.handoffs, strict=True):
            cache.states[self.sent.state] = self.content.state
            handoff.finish(self.num_tokens, self.sent.state)
            self._poll_some()

    def retract(self) -> None:
        for handoff in self.handoffs:
            handoff.retract()
            self._poll_some()
        self.prefill.release(self.sent.blocks, self.sent.state)
        self.sent, self.num_computed = None, 0

    def cancel_handoff(self) -> None:
        for handoff in self.handoffs:
            handoff.cancel()
            self._poll_some()
        self.end_handoff()

    def end_handoff(self) -> None:
        assert all(handoff.is_done for handoff in self.handoffs)
        if self.sent is not None:
            self.prefill.release(self.sent.blocks, self.sent.state)
        self.is_sent = True

    # What the decode server's engine does.

    def open(self) -> None:
        taken = self.decode.take(self.num_tokens)
        if taken is None:
            return
        for cache in self.decode.caches:  # positions before the start are in the cache
            cache.fill(self.content, taken[0], 0, self.start)
        self.got = SimpleNamespace(blocks=taken[0], state=taken[1], arrivals=[])
        for side in self.decode.sides:
            self.got.arrivals.append(
                side.open(self.prefill.engine, self.name, self.start, self.num_tokens, taken[0], taken[1])
            )
            self._poll_some()

    def cancel_arrival(self) -> None:
        for arrival in self.got.arrivals:
            arrival.cancel()
            self._poll_some()
        self.end_arrival()

    def end_arrival(self) -> None:
        """Check what has arrived, and overwrite the blocks."""
        assert all(arrival.is_done for arrival in self.got.arrivals)
        self.has_arrived = not any(arrival.has_failed for arrival in self.got.arrivals)
        if self.has_arrived:
            for cache in self.decode.caches:
                cache.check(self.content, self.got.blocks, self.got.state)
        self.decode.release(self.got.blocks, self.got.state)
        self.is_got = True

    def _poll_some(self) -> None:
        for job in (self.prefill, self.decode):
            if self.random.random() < 0.3:
                job.poll(self.random.randrange(job.layout.tp_size))
