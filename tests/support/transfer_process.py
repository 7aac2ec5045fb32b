"""A rank of a job in a process of its own, which a test commands over a pipe, stops and kills."""

import os
import signal
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from dcpmla.transfer.incoming import Incoming
from dcpmla.transfer.outgoing import Outgoing
from dcpmla.transfer.transport import Peer, rank_name
from tests.support.in_namespace import enter_namespace
from tests.support.launchers import Host
from tests.support.plain_cache import new_layout
from tests.support.ranks import start_process
from tests.support.transfer_soak import WINDOW, SoakRank, new_transport
from tests.support.waiting import wait_until

LAYOUT = new_layout(1, 1, 1, 4)


class Rank:
    """The only rank of a job, over NIXL: its cache, its transfers by number."""

    def __init__(self, kind: type[Outgoing | Incoming], engine: str, seconds: float) -> None:
        transport = new_transport("nixl", rank_name(engine, 0))
        self.cache = SoakRank(LAYOUT, 0)
        self.peer = Peer(engine, LAYOUT, [transport.metadata()])
        limits = {"lease" if kind is Outgoing else "silence": seconds}
        self.side = kind(transport, self.cache.mover, LAYOUT, 0, **limits)
        self.transfers: dict[int, Any] = {}

    def connect(self, peer: Peer) -> None:
        self.side.connect(peer)

    def disconnect(self, engine: str) -> None:
        self.side.disconnect(engine)

    def send(self, number: int, is_whole: bool = True) -> None:
        """Begin a handoff, with all its tokens or without the last one."""
        num_tokens = self.cache.content(number).num_tokens
        self.transfers[number] = handoff = self.side.begin(f"h{number}")
        end = num_tokens - (not is_whole)
        self.cache.fill(number, 0, end)
        handoff.computed(self.cache.blocks(number), end)
        if is_whole:
            handoff.finish(num_tokens, self.cache.write_state(number))

    def open(self, number: int, engine: str = "p") -> None:
        num_tokens = self.cache.content(number).num_tokens
        blocks, state = self.cache.blocks(number), number % WINDOW
        self.transfers[number] = self.side.open(engine, f"h{number}", 0, num_tokens, blocks, state)

    def wait_for_bytes(self, number: int) -> None:
        """Wait until some of a transfer has moved."""
        wait_until(lambda: self.transfers[number].num_bytes > 0, f"nothing of transfer {number} moves", 0.001)

    def wait(self, number: int) -> tuple[bool, str]:
        """Return whether a transfer succeeded, with the right content, and the reason why not."""
        transfer = self.transfers[number]
        wait_until(lambda: transfer.is_done, f"transfer {number} goes on", 0.001)
        if isinstance(self.side, Incoming) and not transfer.has_failed:
            self.cache.check(number)
        return not transfer.has_failed, transfer.reason


class RankProcess:
    """A `Rank` in a process, which sees the network of a host."""

    def __init__(self, kind: type[Outgoing | Incoming], engine: str, seconds: float, host: Host | None = None) -> None:
        self._pipe, there = Pipe()
        self.process = start_process(_serve, (there, host, kind, engine, seconds))
        there.close()
        self.peer: Peer = self._pipe.recv()

    def call(self, name: str, *args: Any) -> Any:
        self._pipe.send((name, args))
        return self._pipe.recv()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def close(self) -> None:
        self.process.kill()
        self.process.join()


def _serve(pipe: Connection, host: Host | None, kind: type[Outgoing | Incoming], engine: str, seconds: float) -> None:
    if host is not None:
        enter_namespace(host.name)
        # These hosts have their memory in common, and an address that each has for itself.
        os.environ |= {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "cable"}
    rank = Rank(kind, engine, seconds)
    pipe.send(rank.peer)
    while True:
        name, args = pipe.recv()
        pipe.send(getattr(rank, name)(*args))
