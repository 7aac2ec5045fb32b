"""Jobs that hand requests over through fake transports, polled one rank at a time in a random order."""

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dcpmla.transfer.incoming import Incoming
from dcpmla.transfer.layout import CacheLayout, owner
from dcpmla.transfer.outgoing import Outgoing
from dcpmla.transfer.parts import RowMover
from dcpmla.transfer.transport import Peer, rank_name
from tests.support.fake_transport import Clock, Network

LEASE, SILENCE = 40.0, 12.0  # seconds of the virtual clock
NUM_BLOCKS, NUM_STATES = 130, 8
MODULES = ("outcome", "served", "outgoing", "incoming")


class StillWorker:
    """A worker without a thread: the test polls."""

    def __init__(self, name: str, device: torch.device, poll: Any, fail: Any) -> None:
        self._poll, self._fail = poll, fail

    def start(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None:
        self._poll()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Replace the threads and the time of all transfers."""
    clock = Clock()
    monkeypatch.setattr("dcpmla.transfer.side.Worker", StillWorker)
    for module in MODULES:
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
        per_rank = layout.block_tokens // layout.dcp_size
        self.rows = [random_bytes(layout.layers, NUM_BLOCKS, per_rank, layout.row) for _ in self.names]
        self.states = [random_bytes(NUM_STATES, 8) for _ in self.names]
        limits = {"lease": LEASE} if kind is Outgoing else {"silence": SILENCE}
        self.sides = [
            kind(transport, RowMover((self.rows[rank], self.states[rank]), layout, rank), layout, rank, **limits)
            for rank, transport in enumerate(transports)
        ]
        self.peer = Peer(engine, layout, [transport.metadata() for transport in transports])
        self.free_blocks, self.free_states = list(range(NUM_BLOCKS)), list(range(NUM_STATES))
        self._guarded: dict[int, list[torch.Tensor]] = {}
        self.stopped = False

    def poll(self, rank: int) -> None:
        if not self.stopped and self.names[rank] not in self.network.lost:
            self.sides[rank].poll()

    def take(self, num_blocks: int) -> tuple[list[int], int] | None:
        """Return free blocks and a state; None if too few are free."""
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
            for rows, content in zip(self.rows, contents, strict=True):
                assert torch.equal(rows[:, block], content)

    def release(self, blocks: list[int], state: int) -> None:
        """Overwrite blocks and a state, as the next request does."""
        for rows, states in zip(self.rows, self.states, strict=True):
            rows[:, blocks] = random_bytes(*rows[:, blocks].shape)
            states[state] = random_bytes(8)
        for block in blocks:
            self._guarded[block] = [rows[:, block].clone() for rows in self.rows]
        self.free_blocks += blocks
        self.free_states.append(state)

    def places(self, position: int, blocks: list[int]) -> list[tuple[int, int, int]]:
        """Return the rank, block and offset of each copy of a position's rows."""
        layout = self.layout
        share = layout.dcp_size * layout.interleave
        local = position // share * layout.interleave + position % layout.interleave
        offset = local % (layout.block_tokens // layout.dcp_size)
        ranks = [r for r in range(layout.tp_size) if r % layout.dcp_size == owner(layout, position)]
        return [(rank, blocks[position // layout.block_tokens], offset) for rank in ranks]


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


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
        layout = prefill.layout
        self.num_tokens = random.randint(1, 40)
        self.start = random.choice([0, 0, random.randint(0, self.num_tokens)])
        self.content = random_bytes(layout.layers, self.num_tokens, layout.row)
        self.state_content = random_bytes(8)
        self.num_computed, self.is_finished = 0, False
        self.sent: SimpleNamespace | None = None  # handoffs, blocks, state
        self.got: SimpleNamespace | None = None  # arrivals, blocks, state, before
        self.is_sent = self.is_got = self.has_arrived = False
        self.handoffs: list[Any] | None = None

    # What the prefill server's engine does.

    def compute(self) -> None:
        """Compute some tokens, in blocks that are allocated first."""
        if self.sent is None:
            taken = self.prefill.take(-(-self.num_tokens // self.prefill.layout.block_tokens))
            if taken is None:
                return
            self.sent = SimpleNamespace(blocks=taken[0], state=taken[1])
        if self.handoffs is None:
            self.handoffs = [side.begin(self.name) for side in self.prefill.sides]
        end = min(self.num_tokens, self.num_computed + self.random.randint(1, 20))
        for position in range(self.num_computed, end):
            for rank, block, offset in self.prefill.places(position, self.sent.blocks):
                self.prefill.rows[rank][:, block, offset] = self.content[:, position]
        self.num_computed = end
        for handoff in self.handoffs:
            handoff.computed(self.sent.blocks, end)
            self._poll_some()

    def finish(self) -> None:
        self.is_finished = True
        for states, handoff in zip(self.prefill.states, self.handoffs, strict=True):
            states[self.sent.state] = self.state_content
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
        taken = self.decode.take(-(-self.num_tokens // self.decode.layout.block_tokens))
        if taken is None:
            return
        before = [rows[:, taken[0]].clone() for rows in self.decode.rows]
        self.got = SimpleNamespace(blocks=taken[0], state=taken[1], before=before, arrivals=[])
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
            self.check_content()
        self.decode.release(self.got.blocks, self.got.state)
        self.is_got = True

    def check_content(self) -> None:
        """Compare all rows, those before the start with what was there, and the state."""
        columns = {block: column for column, block in enumerate(self.got.blocks)}
        for position in range(self.num_tokens):
            for rank, block, offset in self.decode.places(position, self.got.blocks):
                found = self.decode.rows[rank][:, block, offset]
                if position >= self.start:
                    assert torch.equal(found, self.content[:, position]), (self.name, position, rank)
                else:
                    assert torch.equal(found, self.got.before[rank][:, columns[block], offset])
        for states in self.decode.states:
            assert torch.equal(states[self.got.state], self.state_content)

    def _poll_some(self) -> None:
        for job in (self.prefill, self.decode):
            if self.random.random() < 0.3:
                job.poll(self.random.randrange(job.layout.tp_size))
