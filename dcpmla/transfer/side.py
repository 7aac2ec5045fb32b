"""The common part of both ends of transfers: the thread, its calls, peers and messages (`Side`)."""

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, Generic, TypeVar

from dcpmla.transfer.layout import CacheLayout
from dcpmla.transfer.messages import Message, decode, encode
from dcpmla.transfer.moves import SideStream
from dcpmla.transfer.outcome import Outcome, Transfer
from dcpmla.transfer.parts import RowMover
from dcpmla.transfer.route import Route, find_routes
from dcpmla.transfer.staging import Staging
from dcpmla.transfer.transport import Peer, Transport, rank_name, split_name
from dcpmla.transfer.worker import Found, Worker

_MOST_LOGGED = 100  # kinds of wrong messages; a broken peer must not fill the log
_logger = logging.getLogger(__name__)


TransferT = TypeVar("TransferT", bound=Transfer[Any])


class Side(ABC, Generic[TransferT]):
    """One rank's end of all transfers with other jobs.

    The engine's thread calls the public methods, which do not wait: they leave calls for the thread of this object,
    which alone uses the transport.

    Args:
        transport: Transport of this rank; `close` closes it, too.
        mover: Rows of this rank's cache.
        layout: Layout of this job's cache.
        rank: TP rank.
        patience: Seconds without a word of another rank, after which a transfer with it fails.
    """

    is_source: ClassVar[bool]  # whether rows leave this rank
    other: ClassVar[str]  # the other job
    noun: ClassVar[str]  # a transfer, in the log
    looks: ClassVar[int]  # number of looks for silent ranks in the time of the patience

    def __init__(self, transport: Transport, mover: RowMover, layout: CacheLayout, rank: int, patience: float) -> None:
        self._transport, self._mover, self._layout, self._rank = transport, mover, layout, rank
        self._patience, self._looked_at = patience, time.monotonic()
        device = transport.memory.device
        self._staging, self._stream = Staging(transport.memory), SideStream(device)
        self._calls: deque[Callable[[], None]] = deque()
        self._routes: dict[str, dict[int, Route]] = {}  # by engine, and by its ranks that this one talks with
        self._transfers: dict[Hashable, TransferT] = {}
        self._closing: list[tuple[Outcome, str]] = []  # Each ends, for its reason, with its last gather or scatter.
        self._logged: set[str] = set()
        self._worker = Worker(f"kv-transfer-{type(self).__name__.lower()}", device, self.poll, self._fail_all)

    def connect(self, peer: Peer) -> None:
        """Connect to the ranks of another job.

        Raises:
            ValueError: Its cache differs from this one, or metadata of ranks is missing.
        """
        source, target = self._in_order(peer)
        source.check_matches(target)
        if len(peer.agents) != peer.layout.tp_size:
            raise ValueError(
                f"agents of engine {peer.engine} are {len(peer.agents)}; it has {peer.layout.tp_size} ranks"
            )
        self._call(lambda: self._connect(peer))

    def disconnect(self, engine: str) -> None:
        """Forget another job, which has ended or is lost: transfers with it fail."""
        self._call(lambda: self._disconnect(engine))

    def close(self) -> None:
        """Fail all transfers, end the thread and close the transport. Wait for the thread's last work."""
        self._call(lambda: self._fail_all("this server stops"))
        self._worker.close()
        self._stream.synchronize()
        self._advance()
        self._transport.close()

    def poll(self) -> Found:
        """Do what can be done now. For the thread of this object."""
        has_calls = bool(self._calls)
        while self._calls:
            self._calls.popleft()()
        messages = self._transport.receive()
        for name, content in messages:
            try:
                engine, rank = split_name(name)
                self._handle(engine, rank, decode(content))
            except ValueError as error:
                self._log(f"a message of {name[:80]!r} is ignored", error)
        return Found(has_calls or bool(messages), self._advance())

    @abstractmethod
    def _handle(self, engine: str, rank: int, message: Message) -> None:
        """Handle a message; ValueError for one that makes no sense here."""

    @abstractmethod
    def _move(self) -> bool:
        """Go on with all transfers; return whether rows of any are on their way."""

    @abstractmethod
    def _look(self, now: float) -> None:
        """End transfers with ranks that were silent for too long."""

    @abstractmethod
    def _leave(self, transfer: TransferT, reason: str) -> None:
        """Free what a transfer holds, and send its end to the other ranks; a reason means that it has failed."""

    def _advance(self) -> bool:
        """Go on with all transfers; return whether rows of any are on their way."""
        for transfer in list(self._transfers.values()):
            if transfer.outcome.is_done:
                self._end(transfer, transfer.outcome.reason)
        is_moving = self._move()
        for transfer in list(self._transfers.values()):
            if transfer.is_complete:
                self._end(transfer, "")
        now = time.monotonic()
        if now - self._looked_at >= self._patience / self.looks:
            self._looked_at = now
            self._look(now)
        for outcome, reason in self._closing:
            if outcome.moves.is_idle:
                outcome.end(reason)
        self._closing = [each for each in self._closing if not each[0].is_done]
        return is_moving or bool(self._closing)

    def _end(self, transfer: TransferT, reason: str) -> None:
        """End a transfer when its gathers or scatters have ended; with a reason it has failed."""
        del self._transfers[transfer.key]
        self._closing.append((transfer.outcome, reason))
        self._leave(transfer, reason)

    def _fail_all(self, reason: str) -> None:
        for transfer in list(self._transfers.values()):
            self._end(transfer, reason)

    def _try(self, transfer: TransferT, action: Callable[..., bool], *arguments: Any) -> bool:
        """Run an action of an open transfer, and return its result. Any error ends that transfer alone."""
        if self._transfers.get(transfer.key) is not transfer:
            return False
        try:
            return action(*arguments)
        except Exception as error:
            if not isinstance(error, ConnectionError):
                self._log(f"{self.noun} fails", error)
            self._end(transfer, f"{type(error).__name__}: {error}")
            return False

    def _call(self, function: Callable[[], None]) -> None:
        self._calls.append(function)
        self._worker.wake()

    def _in_order(self, peer: Peer) -> tuple[CacheLayout, CacheLayout]:
        """Return the layouts of the prefill server and of the decode server."""
        return (self._layout, peer.layout) if self.is_source else (peer.layout, self._layout)

    def _connect(self, peer: Peer) -> None:
        pairs = find_routes(*self._in_order(peer)).items()
        here, there = (0, 1) if self.is_source else (1, 0)
        self._routes[peer.engine] = {pair[there]: route for pair, route in pairs if pair[here] == self._rank}
        for rank, metadata in enumerate(peer.agents):
            name = rank_name(peer.engine, rank)
            try:
                self._transport.connect(name, metadata)
            except Exception as error:  # its transfers fail when they send; others go on
                self._log(f"{name} is not connected", error)

    def _disconnect(self, engine: str) -> None:
        for transfer in [transfer for transfer in self._transfers.values() if transfer.outcome.engine == engine]:
            self._end(transfer, f"{self.other} {engine} is disconnected")
        for rank in self._routes.pop(engine, ()):
            self._transport.disconnect(rank_name(engine, rank))

    def _try_to_send(self, name: str, message: Message) -> bool:
        """Send a message; return whether its rank is connected."""
        try:
            self._transport.send(name, encode(message))
        except ConnectionError:
            return False
        return True

    def _log(self, text: str, error: Exception) -> None:
        """Log a fault of another rank, each kind once."""
        kind = f"{text}: {type(error).__name__}"
        if kind not in self._logged and len(self._logged) < _MOST_LOGGED:
            self._logged.add(kind)
            _logger.warning("%s: %s; further ones of this kind are not logged", text, error)
