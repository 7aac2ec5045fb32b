"""The interface of transports between ranks of two jobs (`Transport`), and the description of a job (`Peer`)."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from dcpmla.transfer.layout import CacheLayout


class Read(Protocol):
    """A read under way. Its slot is in use until it has ended."""

    @property
    def is_done(self) -> bool:
        """Return whether it has ended, successfully or not."""

    @property
    def has_failed(self) -> bool:
        """Return whether it has ended without its content."""


class Transport(Protocol):
    """The connections of one rank to ranks of other jobs. No call waits for another rank.

    All calls but `metadata` come from one thread, of `Outgoing` or `Incoming`.

    Attributes:
        memory: Staging memory [num_slots, slot_bytes] uint8. Other ranks reach no other memory of this one.
    """

    @property
    def memory(self) -> Tensor: ...

    def metadata(self) -> bytes:
        """Return what ranks of another job need to connect, for a channel that authenticates them."""

    def connect(self, name: str, metadata: bytes) -> None:
        """Connect to a rank.

        Args:
            name: Name of the rank (`rank_name`).
            metadata: The rank's own metadata.
        Raises:
            ValueError: The metadata is damaged, or another rank's.
        """

    def disconnect(self, name: str) -> None:
        """Forget a rank; its reads under way fail. Nothing happens if it is not known."""

    def send(self, name: str, message: bytes) -> None:
        """Send a message. Messages of a rank arrive in order.

        Raises:
            ConnectionError: The rank is not connected, or lost.
        """

    def receive(self) -> list[tuple[str, bytes]]:
        """Return new messages with the names of their senders. A sender may be unknown."""

    def read(self, name: str, there: int, here: int, num_bytes: int, message: bytes) -> Read:
        """Start to read the first bytes of a rank's slot `there` into slot `here` of this one.

        Args:
            message: Message that the rank receives when the read has succeeded.
        Raises:
            ConnectionError: The rank is not connected, or lost.
            ValueError: There is no such slot, or it is smaller.
        """

    def close(self) -> None:
        """End all connections."""


class Peer(NamedTuple):
    """Another job.

    Attributes:
        engine: Its name; a job that starts again has another one.
        layout: The layout of its cache.
        agents: The metadata of the transports of all its TP ranks, in order.
    """

    engine: str
    layout: CacheLayout
    agents: Sequence[bytes]


def rank_name(engine: str, rank: int) -> str:
    """Return the name of a TP rank's transport."""
    return f"{engine}/{rank}"


def split_name(name: str) -> tuple[str, int]:
    """Return the engine and the TP rank of a transport's name.

    Raises:
        ValueError: It is no such name.
    """
    engine, _, rank = name.rpartition("/")
    if not engine or not rank.isdecimal():
        raise ValueError(f"{name!r} is no name of a rank")
    return engine, int(rank)


def check_slots(slot_bytes: Sequence[int], slots: Sequence[int], num_slots: Sequence[int], num_bytes: int) -> None:
    """Check both ends of a read.

    Raises:
        ValueError: One has no such slot, or a smaller one.
    """
    for size, slot, number in zip(slot_bytes, slots, num_slots, strict=True):
        if not 0 <= slot < number or not 0 < num_bytes <= size:
            raise ValueError(f"a read of {num_bytes} bytes of slot {slot}: there are {number} slots of {size} bytes")
