"""The prefill server's end of transfers on one rank (`Outgoing`)."""

import time
from collections import OrderedDict
from collections.abc import Callable

from dcpmla.transfer.handoff import Handoff, Target
from dcpmla.transfer.layout import CacheLayout
from dcpmla.transfer.messages import Alive, Close, Closed, Complete, Message, Open, Taken, Touch, encode
from dcpmla.transfer.pairs import targets_of
from dcpmla.transfer.parts import RowMover
from dcpmla.transfer.route import Route
from dcpmla.transfer.served import Filler, Served
from dcpmla.transfer.side import Closing, Side
from dcpmla.transfer.staging import TAGS_BYTES
from dcpmla.transfer.transport import Peer, Transport, rank_name

LEASE = 120.0  # seconds without a word of a decode rank, after which a handoff ends
_MOST_WAITING = 4096  # requests of decode ranks for handoffs that have not begun
_MOST_ENDED = 1 << 14  # handoffs whose ends are remembered


class _Waiting:
    """A request of a decode rank for a handoff that has not begun, or of a job that is not connected yet."""

    def __init__(self, message: Open) -> None:
        self.message, self.since = message, time.monotonic()


class Outgoing(Side):
    """The blocks and states that one rank of a prefill server sends to ranks of decode servers.

    Args:
        transport, mover, layout, rank: See `Side`.
        lease: Seconds without a word of a decode rank, after which a handoff fails.
    """

    def __init__(
        self, transport: Transport, mover: RowMover, layout: CacheLayout, rank: int, lease: float = LEASE
    ) -> None:
        self._lease = lease
        self._peers: dict[str, dict[int, Route | None]] = {}  # routes to the ranks that this one talks with
        self._served: dict[str, Served] = {}
        self._waiting: dict[tuple[str, str, int], _Waiting] = {}  # Keys: handoff, engine, rank.
        self._ended: OrderedDict[str, str] = OrderedDict()  # reasons, by handoff
        self._closing: list[Closing] = []  # handoffs that end with their gathers
        self._looked_at, self._first = time.monotonic(), 0
        super().__init__(transport, mover, layout, rank)
        self._filler = Filler(self._staging, mover)
        self._worker.start()

    def begin(self, handoff: str, reader: str = "") -> Handoff:
        """Return a handoff that decode ranks may read under a name that was never used before.

        Args:
            reader: Name of the decode server, which alone may read it; "" is the first one that asks.
        """
        begun = Handoff(handoff, reader, self._stream, self._worker.wake)
        self._call(lambda: self._begin(begun))
        return begun

    def _check(self, peer: Peer) -> None:
        self._layout.check_matches(peer.layout)

    def _connect(self, peer: Peer) -> None:
        targets = targets_of(self._layout, peer.layout, self._rank)
        self._peers[peer.engine] = {
            rank: Route(self._layout, self._rank, peer.layout, rank) if has_rows else None
            for rank, has_rows in targets.items()
        }
        self._connect_ranks(peer)
        self._admit()

    def _disconnect(self, engine: str) -> None:
        for served in [served for served in self._served.values() if served.handoff.reader == engine]:
            self._end(served, f"decode server {engine} is disconnected")
        for key in [key for key in self._waiting if key[1] == engine]:
            del self._waiting[key]
        for rank in self._peers.pop(engine, ()):
            self._transport.disconnect(rank_name(engine, rank))

    def _begin(self, handoff: Handoff) -> None:
        if handoff.name in self._served:
            handoff.end(f"another handoff has the name {handoff.name}")
        elif handoff.name in self._ended:
            handoff.end(self._ended[handoff.name] or f"another handoff had the name {handoff.name}")
        elif handoff.reader and handoff.reader not in self._peers:
            handoff.end(f"decode server {handoff.reader} is not connected")
        else:
            self._served[handoff.name] = Served(handoff)
            self._admit()

    def _admit(self) -> None:
        """Open the parts of handoffs that decode ranks wait for, where both are known now."""
        for key in [key for key in self._waiting if key[0] in self._served and key[1] in self._peers]:
            self._open(*key, self._waiting.pop(key).message)

    def _handle(self, engine: str, rank: int, message: Message) -> None:
        handoff, name = message.handoff, rank_name(engine, rank)
        if isinstance(message, Open):
            if handoff in self._ended:
                self._try_to_send(name, Closed(handoff, self._ended[handoff] or "it has ended"))
            elif handoff in self._served and engine in self._peers:
                self._open(handoff, engine, rank, message)
            elif len(self._waiting) < _MOST_WAITING:
                self._waiting[handoff, engine, rank] = _Waiting(message)
            else:
                self._try_to_send(name, Closed(handoff, f"{_MOST_WAITING} requests wait for handoffs already"))
            return
        served = self._served.get(handoff)
        if served is not None and served.handoff.reader in ("", engine):
            self._hear(served, engine, rank, message)
        elif isinstance(message, Touch):
            is_waiting = (handoff, engine, rank) in self._waiting
            reason = self._ended.get(handoff) or "it is not known"
            self._try_to_send(name, Alive(handoff) if is_waiting else Closed(handoff, reason))
        elif isinstance(message, Close) and served is None:
            self._waiting.pop((handoff, engine, rank), None)
            self._note_end(handoff, f"decode server {engine} gave it up")

    def _hear(self, served: Served, engine: str, rank: int, message: Message) -> None:
        """Handle a message about a handoff that has begun."""
        if engine in self._peers:
            served.heard[rank] = time.monotonic()
        target = served.targets.get(rank)
        if isinstance(message, Close):
            self._end(served, f"decode server {engine} gave it up")
        elif isinstance(message, Touch):
            self._try_to_send(rank_name(engine, rank), Alive(message.handoff))
        elif isinstance(message, Taken) and target is not None:
            offer = target.offers.get(message.slot)
            if offer is not None and offer.is_sent and offer.ready.number == message.number:
                del target.offers[message.slot]
                self._staging.free(message.slot)
                served.handoff.num_bytes += offer.num_bytes

    def _open(self, handoff: str, engine: str, rank: int, message: Open) -> None:
        served, name = self._served[handoff], rank_name(engine, rank)
        part_bytes = min(self._staging.part_bytes, message.slot_bytes - TAGS_BYTES)
        if served.handoff.reader not in ("", engine):
            reason = "another decode server reads it"
        elif rank not in self._peers[engine] or message.start > message.num_tokens or part_bytes < 1:
            reason = f"rank {self._rank} of the prefill server cannot send positions {message.start} to "
            reason += f"{message.num_tokens} in slots of {message.slot_bytes} bytes to rank {rank}"
        elif rank in served.targets:
            reason = "it is open already"
        else:
            served.handoff.reader, served.heard[rank] = engine, time.monotonic()
            served.handoff.note_opening()
            route = self._peers[engine][rank]
            served.targets[rank] = Target(name, route, message.start, message.num_tokens, part_bytes)
            return
        self._try_to_send(name, Closed(handoff, reason))

    def _advance(self) -> bool:
        for served in list(self._served.values()):
            if served.handoff.is_done:
                self._end(served, served.handoff.reason)
        opened = [(served, target) for served in self._served.values() for target in served.targets.values()]
        for served, target in opened:
            self._try(served, target, self._announce)
        # Each round fills one slot for each part of a handoff, and the next poll starts with another one.
        self._first = (self._first + 1) % max(len(opened), 1)
        waiting = opened[self._first :] + opened[: self._first]
        while waiting and self._staging.num_free:
            waiting = [(served, target) for served, target in waiting if self._try(served, target, self._fill)]
        for served, target in opened:
            self._try(served, target, self._announce)
        for served in list(self._served.values()):
            if served.is_complete(self._peers):
                self._end(served, "")
        self._look()
        self._closing = [each for each in self._closing if not each.close_if_idle()]
        is_filling = any(not offer.is_sent for _, target in opened for offer in target.offers.values())
        return is_filling or bool(self._closing)

    def _try(self, served: Served, target: Target, action: Callable[[Served, Target], bool]) -> bool:
        """Run an action of an open handoff. Any error that it raises ends that handoff alone."""
        if self._served.get(served.handoff.name) is not served:
            return False
        try:
            return action(served, target)
        except Exception as error:
            if not isinstance(error, ConnectionError):
                self._log("a handoff fails", error)
            self._end(served, f"{type(error).__name__}: {error}")
            return False

    def _fill(self, served: Served, target: Target) -> bool:
        """Fill a slot with the next part; return whether there was one, and a slot."""
        return self._filler.fill(served.handoff, target)

    def _announce(self, served: Served, target: Target) -> bool:
        """Offer the slots that are filled. After the last one was read, the part of the handoff is complete."""
        for offer in target.offers.values():
            if not offer.is_sent and offer.mark.is_done:
                self._transport.send(target.name, encode(offer.ready))
                offer.is_sent = True
        if target.has_sent_all and not target.offers and not target.is_complete:
            self._transport.send(target.name, encode(Complete(served.handoff.name)))
            target.is_complete = True
        return target.is_complete

    def _look(self) -> None:
        """End what waits for longer than the lease."""
        now = time.monotonic()
        if now - self._looked_at < self._lease / 16:
            return
        self._looked_at = now
        for key, waiting in list(self._waiting.items()):
            if now - waiting.since > self._lease:
                del self._waiting[key]
                self._try_to_send(rank_name(*key[1:]), Closed(key[0], f"it did not begin in {self._lease:.0f} s"))
        for served in list(self._served.values()):
            silent = served.silent_rank(now - self._lease, self._peers)
            if silent is not None:
                self._end(served, f"{silent} asked for nothing in {self._lease:.0f} s")

    def _end(self, served: Served, reason: str) -> None:
        """Free the slots of a handoff, and end it when its gathers have ended."""
        del self._served[served.handoff.name]
        self._note_end(served.handoff.name, reason)
        for target in served.targets.values():
            for slot in target.offers:
                self._staging.free(slot)
            if not target.is_complete:
                self._try_to_send(target.name, Closed(served.handoff.name, reason))
        self._closing.append(Closing(served.handoff, reason))

    def _note_end(self, handoff: str, reason: str) -> None:
        self._ended[handoff] = reason
        while len(self._ended) > _MOST_ENDED:
            self._ended.popitem(last=False)

    def _fail_all(self, reason: str) -> None:
        for served in list(self._served.values()):
            self._end(served, reason)
