"""Ranks of two jobs in processes of their own that hand many small requests over, and compare all bytes."""

import time
from random import Random
from typing import Any

import torch
import torch.distributed as dist

from dcpmla.transfer.incoming import Incoming
from dcpmla.transfer.layout import CacheLayout
from dcpmla.transfer.outgoing import Outgoing
from dcpmla.transfer.staging import allocate_staging
from dcpmla.transfer.transport import Peer, Transport, rank_name
from tests.support.plain_cache import Content, PlainCache

WINDOW = 6  # handoffs at a time, each with blocks and a state of its own
MOST_TOKENS = 64


def new_transport(kind: str, name: str, device: str = "cpu") -> Transport:
    """Return a transport of this process; point to point needs a world of ranks."""
    memory = allocate_staging(torch.device(device), num_slots=4, slot_bytes=1024)
    if kind == "nixl":
        from dcpmla.transfer.nixl import NixlTransport

        return NixlTransport(name, memory)
    from dcpmla.transfer.point_to_point import PointToPointTransport

    store = dist.distributed_c10d._get_default_store()
    return PointToPointTransport(name, memory, dist.new_group(list(range(dist.get_world_size()))), store)


class SoakRank:
    """A rank's cache, with blocks and a state for each handoff of a window."""

    def __init__(self, layout: CacheLayout, rank: int, device: str = "cpu") -> None:
        self.layout, self.blocks_each = layout, -(-MOST_TOKENS // layout.tokens[0].per_block)
        self.cache = PlainCache(layout, rank, WINDOW * self.blocks_each, WINDOW, device)
        self.mover = self.cache.mover

    def blocks(self, number: int) -> list[int]:
        first = number % WINDOW * self.blocks_each
        return list(range(first, first + self.blocks_each))[:: -1 if number % 2 else 1]

    def content(self, number: int) -> Content:
        return Content.of(self.layout, number, MOST_TOKENS)

    def fill(self, number: int, start: int, end: int) -> None:
        """Compute positions [start, end) of a handoff."""
        self.cache.fill(self.content(number), self.blocks(number), start, end)

    def write_state(self, number: int) -> int:
        """Compute the state of a handoff; return its number."""
        self.cache.states[number % WINDOW] = self.content(number).state
        return number % WINDOW

    def check(self, number: int) -> None:
        self.cache.check(self.content(number), self.blocks(number), number % WINDOW)


def soak(kind: str, source: CacheLayout, target: CacheLayout, num_handoffs: int, device: str = "cpu") -> int:
    """Run one rank of the world, whose first ranks are the prefill server; return how many bytes have moved."""
    world_rank = dist.get_rank()
    is_source = world_rank < source.tp_size
    engine, rank = ("p", world_rank) if is_source else ("d", world_rank - source.tp_size)
    layout = source if is_source else target
    transport = new_transport(kind, rank_name(engine, rank), device)
    agents: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(agents, transport.metadata())
    cache = SoakRank(layout, rank, device)
    peers = Peer("d", target, agents[source.tp_size :]), Peer("p", source, agents[: source.tp_size])
    side: Outgoing | Incoming
    side = (Outgoing if is_source else Incoming)(transport, cache.mover, layout, rank)
    side.connect(peers[0] if is_source else peers[1])
    try:
        moved = _send(side, cache, num_handoffs) if isinstance(side, Outgoing) else _receive(side, cache, num_handoffs)
        dist.barrier()
    finally:
        side.close()
    return moved


def _send(side: Outgoing, cache: SoakRank, num_handoffs: int) -> int:
    random, active, moved, begun = Random(1), {}, 0, 0
    while active or begun < num_handoffs:
        if begun < num_handoffs and len(active) < WINDOW and begun % WINDOW not in {i % WINDOW for i in active}:
            active[begun] = side.begin(f"h{begun}"), 0
            begun += 1
        for number, (handoff, position) in list(active.items()):
            num_tokens = cache.content(number).num_tokens
            if handoff.is_done:
                assert not handoff.has_failed, handoff.reason
                moved += handoff.num_bytes
                del active[number]
            elif 0 < position < num_tokens and random.random() < 0.2:
                handoff.retract()
                cache.cache.overwrite(cache.blocks(number), number % WINDOW)
                active[number] = handoff, 0
            elif position < num_tokens:
                end = min(num_tokens, position + random.randint(1, 30))
                cache.fill(number, position, end)
                handoff.computed(cache.blocks(number), end)
                active[number] = handoff, end
            elif position == num_tokens:
                handoff.finish(num_tokens, cache.write_state(number))
                active[number] = handoff, num_tokens + 1
        time.sleep(5e-4)
    return moved


def _receive(side: Incoming, cache: SoakRank, num_handoffs: int) -> int:
    active, moved, opened = {}, 0, 0
    while active or opened < num_handoffs:
        if opened < num_handoffs and len(active) < WINDOW and opened % WINDOW not in {i % WINDOW for i in active}:
            num_tokens = cache.content(opened).num_tokens
            blocks, state = cache.blocks(opened), opened % WINDOW
            active[opened] = side.open("p", f"h{opened}", 0, num_tokens, blocks, state)
            opened += 1
        for number, arrival in list(active.items()):
            if arrival.is_done:
                assert not arrival.has_failed, arrival.reason
                cache.check(number)
                moved += arrival.num_bytes
                del active[number]
        time.sleep(5e-4)
    return moved
