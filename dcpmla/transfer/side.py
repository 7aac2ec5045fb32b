"""The common part of both ends of transfers: the thread, its calls, peers and messages (`Side`)."""

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from dcpmla.transfer.layout import CacheLayout
from dcpmla.transfer.messages import Message, decode, encode
from dcpmla.transfer.moves import SideStream
from dcpmla.transfer.outcome import Outcome
from dcpmla.transfer.parts import RowMover
from dcpmla.transfer.staging import Staging
from dcpmla.transfer.transport import Peer, Transport, rank_name, split_name
from dcpmla.transfer.worker import Worker

_MOST_LOGGED = 100  # kinds of wrong messages; a broken peer must not fill the log
_logger = logging.getLogger(__name__)


class Closing(NamedTuple):
    """A transfer that ends when its gathers or scatters have ended."""

    outcome: Outcome
    reason: str

    def close_if_idle(self) -> bool:
        """End the transfer if nothing runs; return whether it has ended."""
        if not self.outcome.moves.is_idle:
            return False
        self.outcome.end(self.reason)
        return True


class Side(ABC):
    """One rank's end of all transfers with other jobs.

    The engine's thread calls the public methods, which do not wait: they leave calls for the thread of this object,
    which alone uses the transport.

    Args:
        transport: Transport of this rank; `close` closes it, too.
        mover: Rows of this rank's cache.
        layout: Layout of this job's cache.
        rank: TP rank.
    """

    def __init__(self, transport: Transport, mover: RowMover, layout: CacheLayout, rank: int) -> None:
        self._transport, self._mover, self._layout, self._rank = transport, mover, layout, rank
        device = transport.memory.device
        self._staging, self._stream = Staging(transport.memory), SideStream(device)
        self._calls: deque[Callable[[], None]] = deque()
        self._logged: set[str] = set()
        self._worker = Worker(f"kv-transfer-{type(self).__name__.lower()}", device, self.poll, self._fail_all)

    def connect(self, peer: Peer) -> None:
        """Connect to the ranks of another job.

        Raises:
            ValueError: Its cache differs from this one, or metadata of ranks is missing.
        """
        self._check(peer)
        if len(peer.agents) != peer.layout.tp_size:
            raise ValueError(
                f"agents of engine {peer.engine} are {len(peer.agents)}; it has {peer.layout.tp_size} ranks"
            )
        self._call(lambda: self._try_to_connect(peer))

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

    def poll(self) -> bool:
        """Do what can be done now; return whether there was work, or work goes on. For the thread of this object."""
        has_work = bool(self._calls)
        while self._calls:
            self._calls.popleft()()
        messages = self._transport.receive()
        for name, content in messages:
            try:
                engine, rank = split_name(name)
                self._handle(engine, rank, decode(content))
            except ValueError as error:
                self._log(f"a message of {name[:80]!r} is ignored", error)
        return self._advance() or has_work or bool(messages)

    @abstractmethod
    def _check(self, peer: Peer) -> None:
        """Raise ValueError if a peer's cache does not suit this one."""

    @abstractmethod
    def _connect(self, peer: Peer) -> None: ...

    @abstractmethod
    def _disconnect(self, engine: str) -> None: ...

    @abstractmethod
    def _handle(self, engine: str, rank: int, message: Message) -> None:
        """Handle a message; ValueError for one that makes no sense here."""

    @abstractmethod
    def _advance(self) -> bool:
        """Go on with all transfers; return whether any copy goes on."""

    @abstractmethod
    def _fail_all(self, reason: str) -> None: ...

    def _call(self, function: Callable[[], None]) -> None:
        self._calls.append(function)
        self._worker.wake()

    def _try_to_connect(self, peer: Peer) -> None:
        try:
            self._connect(peer)
        except Exception as error:  # other transfers go on
            self._log(f"{peer.engine} is not connected", error)

    def _connect_ranks(self, peer: Peer) -> None:
        for rank, metadata in enumerate(peer.agents):
            name = rank_name(peer.engine, rank)
            try:
                self._transport.connect(name, metadata)
            except (ValueError, ConnectionError) as error:  # its transfers fail when they send
                self._log(f"{name} is not connected", error)

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
