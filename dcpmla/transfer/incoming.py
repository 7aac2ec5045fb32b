"""The decode server's end of transfers on one rank (`Incoming`)."""

import time
from collections import deque
from collections.abc import Sequence

from dcpmla.transfer.arrival import Arrival, Source
from dcpmla.transfer.layout import CacheLayout
from dcpmla.transfer.messages import Close, Closed, Complete, Message, Open, Ready, Touch
from dcpmla.transfer.pairs import sources_of
from dcpmla.transfer.parts import RowMover
from dcpmla.transfer.reading import Offered, Reader
from dcpmla.transfer.route import Route
from dcpmla.transfer.side import Closing, Side
from dcpmla.transfer.staging import MOST_SLOTS, TAGS_BYTES
from dcpmla.transfer.transport import Peer, Transport, rank_name

SILENCE = 30.0  # seconds without a word of a prefill rank, after which it counts as lost
_MOST_TOUCHED = 4096  # requests that wait for room


class _Awaited:
    """An arrival in this thread: its sources, and the parts that they offer."""

    def __init__(self, arrival: Arrival, sources: dict[int, Source]) -> None:
        self.arrival, self.sources = arrival, sources
        self.offered: deque[Offered] = deque()
        self.num_moving = 0  # parts in slots of this rank

    @property
    def is_complete(self) -> bool:
        """Return whether everything has arrived."""
        is_moving = self.offered or self.num_moving
        return not is_moving and all(source.is_complete for source in self.sources.values())


class Incoming(Side):
    """The blocks and states that one rank of a decode server reads from ranks of prefill servers.

    Args:
        transport, mover, layout, rank: See `Side`.
        silence: Seconds without a word of a prefill rank, after which an arrival from it fails.
    """

    def __init__(
        self, transport: Transport, mover: RowMover, layout: CacheLayout, rank: int, silence: float = SILENCE
    ) -> None:
        self._silence = silence
        self._peers: dict[str, dict[int, Route | None]] = {}  # routes from the ranks that this one talks with
        self._awaited: dict[tuple[str, str], _Awaited] = {}  # Keys: engine and handoff.
        self._closing: list[Closing] = []  # arrivals that end with their scatters
        self._touched: dict[tuple[str, str], float] = {}  # times, for the engine's thread
        self._looked_at = time.monotonic()
        super().__init__(transport, mover, layout, rank)
        self._reader = Reader(transport, self._staging, mover)
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
        if now - self._touched.get(key, -self._silence) < self._silence / 6:
            return
        if len(self._touched) >= _MOST_TOUCHED:
            self._touched = {key: since for key, since in self._touched.items() if now - since < self._silence}
        self._touched[key] = now
        self._call(lambda: self._send_to_all(engine, Touch(handoff)))

    def decline(self, engine: str, handoff: str) -> None:
        """Let a prefill server free a handoff that is not needed, and not opened."""
        self._call(lambda: self._send_to_all(engine, Close(handoff)))

    def _check(self, peer: Peer) -> None:
        peer.layout.check_matches(self._layout)

    def _connect(self, peer: Peer) -> None:
        sources = sources_of(peer.layout, self._layout, self._rank)
        self._peers[peer.engine] = {
            rank: Route(peer.layout, rank, self._layout, self._rank) if has_rows else None
            for rank, has_rows in sources.items()
        }
        self._connect_ranks(peer)

    def _disconnect(self, engine: str) -> None:
        for awaited in [awaited for awaited in self._awaited.values() if awaited.arrival.engine == engine]:
            self._end(awaited, f"prefill server {engine} is disconnected")
        for rank in self._peers.pop(engine, ()):
            self._transport.disconnect(rank_name(engine, rank))

    def _open(self, arrival: Arrival) -> None:
        key = arrival.engine, arrival.name
        if arrival.engine not in self._peers or key in self._awaited:
            is_open = "is opened already" if key in self._awaited else "is not connected"
            self._closing.append(
                Closing(arrival, f"handoff {arrival.name} of prefill server {arrival.engine} {is_open}")
            )
            return
        start, end, limit, now = arrival.start, arrival.num_tokens, self._staging.part_bytes, time.monotonic()
        sources = {
            rank: Source(rank_name(arrival.engine, rank), route, start, end, limit, now)
            for rank, route in self._peers[arrival.engine].items()
        }
        self._awaited[key] = awaited = _Awaited(arrival, sources)
        message = Open(arrival.name, start, end, limit + TAGS_BYTES)
        for source in sources.values():
            if not self._try_to_send(source.name, message):
                self._end(awaited, f"{source.name} is lost")
                return

    def _handle(self, engine: str, rank: int, message: Message) -> None:
        awaited = self._awaited.get((engine, message.handoff))
        source = None if awaited is None else awaited.sources.get(rank)
        if awaited is None or source is None or source.is_complete:
            return  # the arrival has ended
        source.heard = time.monotonic()
        try:
            if isinstance(message, Ready):
                awaited.offered.append(Offered(awaited.arrival, source.name, source.accept(message), message))
            elif isinstance(message, Complete):
                source.finish()
            elif isinstance(message, Closed):
                self._end(awaited, f"{source.name}: {message.reason}")
        except Exception as error:
            self._log("an arrival fails", error)
            self._end(awaited, f"{type(error).__name__}: {error}")

    def _advance(self) -> bool:
        for arrival, fault in self._reader.advance():
            awaited = self._awaited.get((arrival.engine, arrival.name))
            if awaited is not None and awaited.arrival is arrival:
                awaited.num_moving -= 1
                if fault:
                    self._end(awaited, fault)
        for awaited in list(self._awaited.values()):
            arrival = awaited.arrival
            if arrival.is_done:
                self._end(awaited, arrival.reason)
            elif awaited.is_complete:
                self._end(awaited, "")
        self._start_reads()
        self._look()
        self._closing = [each for each in self._closing if not each.close_if_idle()]
        return bool(self._closing) or self._reader.is_busy

    def _start_reads(self) -> None:
        """Start reads while slots are free, one for each arrival in turn."""
        waiting = [awaited for awaited in self._awaited.values() if awaited.offered]
        while waiting and self._staging.num_free:
            waiting = [awaited for awaited in waiting if self._start_read(awaited)]

    def _start_read(self, awaited: _Awaited) -> bool:
        """Start the next read of an arrival; return whether there is another one."""
        if not awaited.offered or awaited.num_moving == MOST_SLOTS:
            return False
        try:
            if not self._reader.start(awaited.offered[0]):
                return False
        except Exception as error:
            self._end(awaited, f"{type(error).__name__}: {error}")
            return False
        awaited.offered.popleft()
        awaited.num_moving += 1
        return True

    def _look(self) -> None:
        """Send signs of life, and fail arrivals from ranks that send none."""
        now = time.monotonic()
        if now - self._looked_at < self._silence / 6:
            return
        self._looked_at = now
        for awaited in list(self._awaited.values()):
            for source in awaited.sources.values():
                if source.is_complete:
                    continue
                if now - source.heard > self._silence:
                    self._end(awaited, f"{source.name} was silent for {self._silence:.0f} s")
                    break
                if not self._try_to_send(source.name, Touch(awaited.arrival.name)):
                    self._end(awaited, f"{source.name} is lost")
                    break

    def _send_to_all(self, engine: str, message: Message) -> None:
        """Send a message to the ranks of a prefill server that this one talks with."""
        for rank in self._peers.get(engine, ()):
            self._try_to_send(rank_name(engine, rank), message)

    def _end(self, awaited: _Awaited, reason: str) -> None:
        """End an arrival when its scatters have ended; with a reason it has failed, and no other part is scattered."""
        arrival = awaited.arrival
        del self._awaited[arrival.engine, arrival.name]
        if reason:
            arrival.is_wanted = False
            for source in awaited.sources.values():
                self._try_to_send(source.name, Close(arrival.name))
        self._closing.append(Closing(arrival, reason))

    def _fail_all(self, reason: str) -> None:
        for awaited in list(self._awaited.values()):
            self._end(awaited, reason)
