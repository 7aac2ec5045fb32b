"""The prefill server's end of transfers on one rank (`Outgoing`)."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

from dcpmla.transfer.handoff import Handoff, Target
from dcpmla.transfer.layout import CacheLayout
from dcpmla.transfer.messages import Alive, Close, Closed, Complete, Message, Open, Taken, Touch, encode
from dcpmla.transfer.parts import RowMover
from dcpmla.transfer.served import Filler, Served
from dcpmla.transfer.side import Side
from dcpmla.transfer.staging import TAGS_BYTES
from dcpmla.transfer.transport import Peer, Transport, rank_name

LEASE = 120.0  # seconds without a word of a decode rank, after which a handoff ends
_MOST_WAITING = 4096  # requests of decode ranks for handoffs that have not begun
_MOST_ENDED = 1 << 14  # handoffs whose ends are remembered


class Outgoing(Side[Served]):
    """The blocks and states that one rank of a prefill server sends to ranks of decode servers.

    Args:
        transport, mover, layout, rank: See `Side`.
        lease: Seconds without a word of a decode rank, after which a handoff fails.
    """

    is_source, other, noun, looks = True, "decode server", "a handoff", 16

    def __init__(
        self, transport: Transport, mover: RowMover, layout: CacheLayout, rank: int, lease: float = LEASE
    ) -> None:
        super().__init__(transport, mover, layout, rank, lease)
        # Requests of decode ranks for handoffs that have not begun, or of jobs that are not connected yet, with their
        # times, by handoff, engine and rank.
        self._waiting: dict[tuple[str, str, int], tuple[Open, float]] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()  # reasons, by handoff
        self._first = 0
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

    def _connect(self, peer: Peer) -> None:
        super()._connect(peer)
        self._admit()

    def _disconnect(self, engine: str) -> None:
        super()._disconnect(engine)
        for key in [key for key in self._waiting if key[1] == engine]:
            del self._waiting[key]

    def _begin(self, handoff: Handoff) -> None:
        if handoff.name in self._transfers:
            handoff.end(f"another handoff has the name {handoff.name}")
        elif handoff.name in self._ended:
            handoff.end(self._ended[handoff.name] or f"another handoff had the name {handoff.name}")
        elif handoff.engine and handoff.engine not in self._routes:
            handoff.end(f"decode server {handoff.engine} is not connected")
        else:
            self._transfers[handoff.name] = Served(handoff, self._routes.get(handoff.engine, ()))
            self._admit()

    def _admit(self) -> None:
        """Open the parts of handoffs that decode ranks wait for, where both are known now."""
        for key in [key for key in self._waiting if key[0] in self._transfers and key[1] in self._routes]:
            self._open(*key, self._waiting.pop(key)[0])

    def _handle(self, engine: str, rank: int, message: Message) -> None:
        handoff, name = message.handoff, rank_name(engine, rank)
        if isinstance(message, Open):
            if handoff in self._ended:
                self._try_to_send(name, Closed(handoff, self._ended[handoff] or "it has ended"))
            elif handoff in self._transfers and engine in self._routes:
                self._open(handoff, engine, rank, message)
            elif len(self._waiting) < _MOST_WAITING:
                self._waiting[handoff, engine, rank] = message, time.monotonic()
            else:
                self._try_to_send(name, Closed(handoff, f"{_MOST_WAITING} requests wait for handoffs already"))
            return
        served = self._transfers.get(handoff)
        if served is not None and served.outcome.engine in ("", engine):
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
        if engine in self._routes:
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
                served.outcome.num_bytes += offer.num_bytes

    def _open(self, handoff: str, engine: str, rank: int, message: Open) -> None:
        served, name = self._transfers[handoff], rank_name(engine, rank)
        part_bytes = min(self._staging.part_bytes, message.slot_bytes - TAGS_BYTES)
        if served.outcome.engine not in ("", engine):
            reason = "another decode server reads it"
        elif rank not in self._routes[engine] or message.start > message.num_tokens or part_bytes < 1:
            reason = f"rank {self._rank} of the prefill server cannot send positions {message.start} to "
            reason += f"{message.num_tokens} in slots of {message.slot_bytes} bytes to rank {rank}"
        elif rank in served.targets:
            reason = "it is open already"
        else:
            served.outcome.engine, served.ranks = engine, set(self._routes[engine])
            served.heard[rank] = time.monotonic()
            served.outcome.note_opening()
            route = self._routes[engine][rank]
            served.targets[rank] = Target(name, route, message.start, message.num_tokens, part_bytes)
            return
        self._try_to_send(name, Closed(handoff, reason))

    def _move(self) -> bool:
        opened = [(served, target) for served in self._transfers.values() for target in served.targets.values()]
        self._run(self._announce, opened)
        # Each round fills one slot for each part of a handoff, and the next poll starts with another one.
        self._first = (self._first + 1) % max(len(opened), 1)
        waiting = opened[self._first :] + opened[: self._first]
        while waiting and self._staging.num_free:
            waiting = self._run(lambda served, target: self._filler.fill(served.outcome, target), waiting)
        self._run(self._announce, opened)
        return any(target.offers for _, target in opened)

    def _run(
        self, action: Callable[[Served, Target], bool], opened: Iterable[tuple[Served, Target]]
    ) -> list[tuple[Served, Target]]:
        """Run an action for ranks; return those for which it is true."""
        return [each for each in opened if self._try(each[0], action, *each)]

    def _announce(self, served: Served, target: Target) -> bool:
        """Offer the slots that are filled. After the last one was read, the part of the handoff is complete."""
        for offer in target.offers.values():
            if not offer.is_sent and offer.mark.is_done:
                self._transport.send(target.name, encode(offer.ready))
                offer.is_sent = True
        if target.has_sent_all and not target.offers and not target.is_complete:
            self._transport.send(target.name, encode(Complete(served.outcome.name)))
            target.is_complete = True
        return target.is_complete

    def _look(self, now: float) -> None:
        for key, (_, since) in list(self._waiting.items()):
            if now - since > self._patience:
                del self._waiting[key]
                self._try_to_send(rank_name(*key[1:]), Closed(key[0], f"it did not begin in {self._patience:.0f} s"))
        for served in list(self._transfers.values()):
            silent = served.silent_rank(now - self._patience)
            if silent is not None:
                self._end(served, f"{silent} asked for nothing in {self._patience:.0f} s")

    def _leave(self, transfer: Served, reason: str) -> None:
        self._note_end(transfer.outcome.name, reason)
        for target in transfer.targets.values():
            for slot in target.offers:
                self._staging.free(slot)
            if not target.is_complete:
                self._try_to_send(target.name, Closed(transfer.outcome.name, reason))

    def _note_end(self, handoff: str, reason: str) -> None:
        self._ended[handoff] = reason
        while len(self._ended) > _MOST_ENDED:
            self._ended.popitem(last=False)
