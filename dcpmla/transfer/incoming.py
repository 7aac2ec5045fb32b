"""The decode server's end of transfers on one rank (`Incoming`)."""

import time
from collections.abc import Sequence

from dcpmla.transfer.arrival import Arrival, Awaited, Offered, Source
from dcpmla.transfer.layout import CacheLayout
from dcpmla.transfer.messages import Close, Closed, Complete, Message, Open, Ready, Taken, Touch, encode
from dcpmla.transfer.parts import RowMover
from dcpmla.transfer.side import Side
from dcpmla.transfer.staging import MOST_SLOTS, TAGS_BYTES, make_tag, tags_match
from dcpmla.transfer.transport import Transport, rank_name

SILENCE = 30.0  # seconds without a word of a prefill rank, after which it counts as lost
_MOST_TOUCHED = 4096  # requests that wait for room


class Incoming(Side[Awaited]):
    """The blocks and states that one rank of a decode server reads from ranks of prefill servers.

    Rows are read, not written by the prefill ranks, because a lost rank may wake up: it was stopped, or its host was
    cut off. A slot that it had leave to write to could then never hold another prompt's rows. No message takes such a
    leave back from a rank that does not answer, and where memory is mapped (CUDA IPC, shared memory) no call of NIXL
    does. A read needs no leave: this rank frees a slot after its own read, and a prefill rank ends the handoff before
    it frees a slot that was not read. Then `Complete` never follows, without which no arrival ends well: a prefill rank
    sends it once each slot was read (`Taken`) while it held its part. A write would save no message: one goes after it
    in place of the one before a read. It would save UCX's emulation of reads over TCP.

    Args:
        transport, mover, layout, rank: See `Side`.
        silence: Seconds without a word of a prefill rank, after which an arrival from it fails.
    """

    is_source, other, noun, looks = False, "prefill server", "an arrival", 6

    def __init__(
        self, transport: Transport, mover: RowMover, layout: CacheLayout, rank: int, silence: float = SILENCE
    ) -> None:
        super().__init__(transport, mover, layout, rank, silence)
        self._touched: dict[tuple[str, str], float] = {}  # times, for the engine's thread
        self._readings: list[Offered] = []  # in slots of this rank
        self._worker.start()

    def open(
        self, engine: str, handoff: str, start: int, num_tokens: int, blocks: Sequence[int], state: int | None
    ) -> Arrival:
        """Start to read a handoff of a prefill server, which may begin later.

        Args:
            engine: Name of the server; if it is not connected, the arrival fails.
            handoff: Name of the handoff. It is opened once.
            start: First position to read; those before it are in the blocks.
            num_tokens: Number of tokens of the prompt.
            blocks: The request's blocks, from position 0 on. Until the arrival is done or cancelled, it alone writes to
                the positions from `start` on.
            state: Number of the state to fill; None for caches without states.
        """
        arrival = Arrival(handoff, engine, start, num_tokens, blocks, state, self._stream, self._worker.wake)
        self._call(lambda: self._open(arrival))
        return arrival

    def touch(self, engine: str, handoff: str) -> None:
        """Keep the lease of a handoff that is not opened yet. Calls that follow soon do nothing."""
        key, now = (engine, handoff), time.monotonic()
        if now - self._touched.get(key, -self._patience) < self._patience / 6:
            return
        if len(self._touched) >= _MOST_TOUCHED:
            self._touched = {key: since for key, since in self._touched.items() if now - since < self._patience}
        self._touched[key] = now
        self._call(lambda: self._send_to_all(engine, Touch(handoff)))

    def decline(self, engine: str, handoff: str) -> None:
        """Let a prefill server free a handoff that is not needed, and not opened."""
        self._call(lambda: self._send_to_all(engine, Close(handoff)))

    def _open(self, arrival: Arrival) -> None:
        key = arrival.engine, arrival.name
        if arrival.engine not in self._routes or key in self._transfers:
            is_open = "is opened already" if key in self._transfers else "is not connected"
            arrival.end(f"handoff {arrival.name} of prefill server {arrival.engine} {is_open}")
            return
        start, end, limit, now = arrival.start, arrival.num_tokens, self._staging.part_bytes, time.monotonic()
        sources = {
            rank: Source(rank_name(arrival.engine, rank), route, start, end, limit, part_bytes=limit, heard=now)
            for rank, route in self._routes[arrival.engine].items()
        }
        self._transfers[key] = awaited = Awaited(arrival, sources)
        message = Open(arrival.name, start, end, limit + TAGS_BYTES)
        for source in sources.values():
            if not self._try_to_send(source.name, message):
                self._end(awaited, f"{source.name} is lost")
                return

    def _handle(self, engine: str, rank: int, message: Message) -> None:
        awaited = self._transfers.get((engine, message.handoff))
        source = None if awaited is None else awaited.sources.get(rank)
        if awaited is None or source is None or source.is_complete:
            return  # the arrival has ended
        source.heard = time.monotonic()
        self._try(awaited, self._accept, awaited, source, message)

    def _accept(self, awaited: Awaited, source: Source, message: Message) -> bool:
        """Accept a message of an open arrival."""
        if isinstance(message, Ready):
            awaited.offered.append(Offered(awaited, source.name, source.accept(message), message))
        elif isinstance(message, Complete):
            source.finish()
        elif isinstance(message, Closed):
            self._end(awaited, f"{source.name}: {message.reason}")
        return True

    def _move(self) -> bool:
        faults = [(offered, fault) for offered in self._readings if (fault := self._go_on(offered)) is not None]
        for offered, fault in faults:
            self._readings.remove(offered)
            self._staging.free(offered.slot)
            offered.awaited.num_moving -= 1
            if fault and self._transfers.get(offered.awaited.key) is offered.awaited:
                self._end(offered.awaited, fault)
        # Reads start while slots are free, one for each arrival in turn.
        waiting = [awaited for awaited in self._transfers.values() if awaited.offered]
        while waiting and self._staging.num_free:
            waiting = [awaited for awaited in waiting if self._try(awaited, self._start_read, awaited)]
        return bool(self._readings)

    def _start_read(self, awaited: Awaited) -> bool:
        """Start the next read of an arrival; return whether there may be another one.

        Raises:
            ConnectionError: The rank is lost.
            ValueError: It has no such slot.
        """
        is_full = not awaited.offered or awaited.num_moving == MOST_SLOTS
        slot = None if is_full else self._staging.take(awaited.outcome.engine)
        if slot is None:
            return False
        offered = awaited.offered[0]
        ready, num_bytes = offered.ready, offered.part.num_bytes + TAGS_BYTES
        taken = encode(Taken(ready.handoff, ready.slot, ready.number))
        try:
            offered.read = self._transport.read(offered.name, ready.slot, slot, num_bytes, taken)
        except BaseException:
            self._staging.free(slot)
            raise
        offered.slot = slot
        self._readings.append(awaited.offered.popleft())
        awaited.num_moving += 1
        return True

    def _go_on(self, offered: Offered) -> str | None:
        """Go on with a part that is read or scattered; return None until it has ended, then its fault, or ""."""
        try:
            return self._advance_part(offered)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def _advance_part(self, offered: Offered) -> str | None:
        arrival, ready, read = offered.awaited.outcome, offered.ready, offered.read
        assert read is not None
        if offered.mark is None:
            if not read.is_done:
                return None
            if read.has_failed:
                return f"a read from {offered.name} failed"
            if not arrival.is_wanted:
                return ""
            offered.mark = arrival.moves.run(lambda: self._scatter(offered), generation=0, after=arrival.opening)
            if offered.mark is None:
                return ""
        if not offered.mark.is_done:
            return None
        assert offered.tags is not None
        if not tags_match(offered.tags, make_tag(ready.handoff, ready.number)):
            return f"slot {ready.slot} of {offered.name} was used again before it was read"
        arrival.num_bytes += offered.part.num_bytes
        return ""

    def _scatter(self, offered: Offered) -> None:
        arrival, part, slot = offered.awaited.outcome, offered.part, offered.slot
        offered.tags = self._staging.read_tags(slot, part.num_bytes)
        self._mover.scatter(part, arrival.blocks, arrival.state, self._staging.content(slot, part.num_bytes))

    def _look(self, now: float) -> None:
        for awaited in list(self._transfers.values()):
            for source in awaited.sources.values():
                if source.is_complete:
                    continue
                if now - source.heard > self._patience:
                    self._end(awaited, f"{source.name} was silent for {self._patience:.0f} s")
                    break
                if not self._try_to_send(source.name, Touch(awaited.outcome.name)):
                    self._end(awaited, f"{source.name} is lost")
                    break

    def _send_to_all(self, engine: str, message: Message) -> None:
        """Send a message to the ranks of a prefill server that this one talks with."""
        for rank in self._routes.get(engine, ()):
            self._try_to_send(rank_name(engine, rank), message)

    def _leave(self, transfer: Awaited, reason: str) -> None:
        if reason:
            transfer.outcome.is_wanted = False  # no other part is scattered
            for source in transfer.sources.values():
                self._try_to_send(source.name, Close(transfer.outcome.name))
