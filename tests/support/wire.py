"""Transfers between the caches of two engines in one process, over a transport in memory that is late and torn."""

from random import Random
from typing import Any

from dcpmla.runtime.engine import Engine
from dcpmla.transfer import side
from dcpmla.transfer.arrival import Arrival
from dcpmla.transfer.incoming import Incoming
from dcpmla.transfer.layout import describe
from dcpmla.transfer.outgoing import Outgoing
from dcpmla.transfer.parts import RowMover
from dcpmla.transfer.transport import Peer, rank_name
from tests.support.fake_transport import Network

_PATIENCE, _STEP = 30.0, 0.25  # seconds of the virtual clock (`still_transfers`)


class Wire:
    """Both ends of the transfers from one engine, "prefill", to another one, "d". A third one, "e", never answers.

    Args:
        share_failing: Part of the looks at a transfer at which it is cancelled.
    """

    def __init__(self, here: Engine, there: Engine, rng: Random, share_failing: float = 0.0) -> None:
        self.rng, self.share_failing = rng, share_failing
        self.arrivals: list[Arrival] = []
        self.touched: list[tuple[str, str]] = []
        network, layout = Network(rng), describe(here.cache, here.dcp)
        names = ("prefill", "d", "e")
        transports = [network.new(rank_name(name, 0), 3, 64) for name in names]
        peers = [Peer(name, layout, [each.metadata()]) for name, each in zip(names, transports, strict=True)]
        outgoing = Outgoing(transports[0], RowMover(here.cache, layout), layout, 0, _PATIENCE)
        incoming: Any = Incoming(transports[1], RowMover(there.cache, layout), layout, 0, _PATIENCE)
        outgoing.connect(peers[1])
        outgoing.connect(peers[2])
        incoming.connect(peers[0])
        self._sides, open_one, touch = (outgoing, incoming), incoming.open, incoming.touch
        incoming.open = lambda *call: self.arrivals.append(open_one(*call)) or self.arrivals[-1]
        incoming.touch = lambda *call: self.touched.append(call) or touch(*call)
        here.link(outgoing, None)
        there.link(None, incoming)

    def advance(self) -> None:
        """Let all transfers go on."""
        clock: Any = side.time
        clock.now += _STEP
        for each in self._sides:
            each.poll()
        for arrival in self.arrivals:
            if not arrival.is_done and self.rng.random() < self.share_failing:
                arrival.cancel()
