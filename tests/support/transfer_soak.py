"""Ranks of two jobs in processes of their own that hand many small requests over, and compare all bytes."""

import time
from random import Random
from typing import Any

import torch
import torch.distributed as dist

from dcpmla.transfer.incoming import Incoming
from dcpmla.transfer.layout import CacheLayout, owner
from dcpmla.transfer.outgoing import Outgoing
from dcpmla.transfer.parts import RowMover
from dcpmla.transfer.staging import allocate_staging
from dcpmla.transfer.transport import Peer, Transport, rank_name

WINDOW = 6  # handoffs at a time, each with blocks and a state of its own
MOST_TOKENS = 64


def new_transport(kind: str, name: str, num_slots: int = 4, slot_bytes: int = 1024) -> Transport:
    """Return a transport of this process; point to point needs a world of ranks."""
    memory = allocate_staging(torch.device("cpu"), num_slots, slot_bytes)
    if kind == "nixl":
        from dcpmla.transfer.nixl import NixlTransport

        return NixlTransport(name, memory)
    from dcpmla.transfer.point_to_point import PointToPointTransport

    store = dist.distributed_c10d._get_default_store()
    return PointToPointTransport(name, memory, dist.new_group(list(range(dist.get_world_size()))), store)


class SoakRank:
    """A rank's cache: the content of handoff i is drawn from a generator with the seed i."""

    def __init__(self, layout: CacheLayout, rank: int) -> None:
        self.layout, self.rank = layout, rank
        self.blocks_each = -(-MOST_TOKENS // layout.block_tokens)
        per_rank = layout.block_tokens // layout.dcp_size
        shape = layout.layers, WINDOW * self.blocks_each, per_rank, layout.row
        self.rows = torch.randint(0, 255, shape, dtype=torch.uint8)
        self.states = torch.randint(0, 255, (WINDOW, 8), dtype=torch.uint8)
        self.mover = RowMover((self.rows, self.states), layout, rank)

    def blocks(self, number: int) -> list[int]:
        first = number % WINDOW * self.blocks_each
        return list(range(first, first + self.blocks_each))[:: -1 if number % 2 else 1]

    def content(self, number: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        """Return the number of tokens, their rows [layers, tokens, row] and the state [8] of a handoff."""
        generator = torch.Generator().manual_seed(number)
        num_tokens = Random(number).randint(1, MOST_TOKENS)
        shape = self.layout.layers, num_tokens, self.layout.row
        rows = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        return num_tokens, rows, torch.randint(0, 256, (8,), dtype=torch.uint8, generator=generator)

    def view(self, number: int) -> tuple[list[int], torch.Tensor]:
        """Return the positions of a handoff that this rank has, and their rows [layers, positions, row] as a copy."""
        num_tokens = self.content(number)[0]
        mine = [p for p in range(num_tokens) if owner(self.layout, p) == self.rank % self.layout.dcp_size]
        return mine, self.rows[self.index(mine, number)]

    def index(self, positions: list[int], number: int) -> Any:
        share, blocks = self.layout.dcp_size * self.layout.interleave, self.blocks(number)
        per_rank = self.layout.block_tokens // self.layout.dcp_size
        local = [p // share * self.layout.interleave + p % self.layout.interleave for p in positions]
        return (
            slice(None),
            torch.tensor([blocks[p // self.layout.block_tokens] for p in positions], dtype=torch.long),
            torch.tensor([each % per_rank for each in local], dtype=torch.long),
        )

    def fill(self, number: int, start: int, end: int) -> None:
        """Compute positions [start, end) of a handoff."""
        mine = [p for p in self.view(number)[0] if start <= p < end]
        self.rows[self.index(mine, number)] = self.content(number)[1][:, mine]

    def is_right(self, number: int) -> bool:
        positions, rows = self.view(number)
        _, expected, state = self.content(number)
        return torch.equal(rows, expected[:, positions]) and torch.equal(self.states[number % WINDOW], state)


def soak(kind: str, source: CacheLayout, target: CacheLayout, num_handoffs: int) -> dict[str, float]:
    """Run one rank of the world, whose first ranks are the prefill server; return figures."""
    world_rank = dist.get_rank()
    is_source = world_rank < source.tp_size
    engine, rank = ("p", world_rank) if is_source else ("d", world_rank - source.tp_size)
    layout = source if is_source else target
    transport = new_transport(kind, rank_name(engine, rank))
    agents: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(agents, transport.metadata())
    cache = SoakRank(layout, rank)
    peers = Peer("d", target, agents[source.tp_size :]), Peer("p", source, agents[: source.tp_size])
    side: Outgoing | Incoming
    side = (Outgoing if is_source else Incoming)(transport, cache.mover, layout, rank)
    side.connect(peers[0] if is_source else peers[1])
    started = time.perf_counter()
    try:
        moved = _send(side, cache, num_handoffs) if isinstance(side, Outgoing) else _receive(side, cache, num_handoffs)
        seconds = time.perf_counter() - started
        dist.barrier()
    finally:
        side.close()
    return {"bytes": moved, "seconds": seconds}


def _send(side: Outgoing, cache: SoakRank, num_handoffs: int) -> int:
    random, active, moved, begun = Random(1), {}, 0, 0
    while active or begun < num_handoffs:
        if begun < num_handoffs and len(active) < WINDOW and begun % WINDOW not in {i % WINDOW for i in active}:
            active[begun] = side.begin(f"h{begun}"), 0
            begun += 1
        for number, (handoff, position) in list(active.items()):
            num_tokens, _, state = cache.content(number)
            if handoff.is_done:
                assert not handoff.has_failed, handoff.reason
                moved += handoff.num_bytes
                del active[number]
            elif 0 < position < num_tokens and random.random() < 0.2:
                handoff.retract()
                cache.rows[:, cache.blocks(number)] = 0xEE
                active[number] = handoff, 0
            elif position < num_tokens:
                end = min(num_tokens, position + random.randint(1, 30))
                cache.fill(number, position, end)
                handoff.computed(cache.blocks(number), end)
                active[number] = handoff, end
            elif position == num_tokens:
                cache.states[number % WINDOW] = state
                handoff.finish(num_tokens, number % WINDOW)
                active[number] = handoff, num_tokens + 1
        time.sleep(5e-4)
    return moved


def _receive(side: Incoming, cache: SoakRank, num_handoffs: int) -> int:
    active, moved, opened = {}, 0, 0
    while active or opened < num_handoffs:
        if opened < num_handoffs and len(active) < WINDOW and opened % WINDOW not in {i % WINDOW for i in active}:
            num_tokens = cache.content(opened)[0]
            blocks, state = cache.blocks(opened), opened % WINDOW
            active[opened] = side.open("p", f"h{opened}", 0, num_tokens, blocks, state)
            opened += 1
        for number, arrival in list(active.items()):
            if arrival.is_done:
                assert not arrival.has_failed, arrival.reason
                assert cache.is_right(number), number
                moved += arrival.num_bytes
                del active[number]
        time.sleep(5e-4)
    return moved
