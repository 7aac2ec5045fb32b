"""The base of transports between ranks of two jobs (`Transport`), and what a job tells of itself (`Peer`)."""

import json
from abc import ABC, abstractmethod
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


class Slots(NamedTuple):
    """A rank's staging memory, as other ranks see it.

    Attributes:
        agent: Metadata of NIXL's agent, in base64; "" without NIXL.
        address: Address of the first slot; without NIXL, the rank's number in the world.
        kind: NIXL's name of the kind of memory.
        device: Number of the device.
    """

    agent: str
    address: int
    num_slots: int
    slot_bytes: int
    kind: str = ""
    device: int = 0


class Transport(ABC):
    """The connections of one rank to ranks of other jobs. No call waits for another rank.

    A rank's metadata are its name and its staging memory, in JSON. All calls but `metadata` come from one thread, of
    `Outgoing` or `Incoming`.

    Args:
        name: Name of this rank (`rank_name`).
        memory: Staging memory [num_slots, slot_bytes] uint8. Other ranks reach no other memory of this one.
        own: The staging memory as other ranks see it.
    """

    def __init__(self, name: str, memory: Tensor, own: Slots) -> None:
        self.memory, self._name, self._own = memory, name, own
        self._metadata = json.dumps({"name": name, **own._asdict()}).encode()
        self._remotes: dict[str, Slots] = {}

    def metadata(self) -> bytes:
        """Return what ranks of another job need to connect, for a channel that authenticates them."""
        return self._metadata

    def connect(self, name: str, metadata: bytes) -> None:
        """Connect to a rank.

        Args:
            name: Name of the rank (`rank_name`).
            metadata: The rank's own metadata.
        Raises:
            ValueError: The metadata is damaged, or another rank's.
        """
        if name in self._remotes:
            raise ValueError(f"{name} is connected already")
        try:
            fields = json.loads(metadata)
            if fields.pop("name") != name:
                raise ValueError("it is another rank's")
            remote = Slots(**fields)
            if [*map(type, remote)] != [*map(type, self._own)]:
                raise ValueError("its fields have other types")
            self._add(name, remote)
        except Exception as error:
            raise ValueError(f"the metadata of {name} is wrong: {type(error).__name__}: {error}") from error
        self._remotes[name] = remote

    def disconnect(self, name: str) -> None:
        """Forget a rank; its reads under way fail. Nothing happens if it is not known."""
        if self._remotes.pop(name, None) is not None:
            self._remove(name)

    @abstractmethod
    def send(self, name: str, message: bytes) -> None:
        """Send a message. Messages of a rank arrive in order.

        Raises:
            ConnectionError: The rank is not connected, or lost.
        """

    @abstractmethod
    def receive(self) -> list[tuple[str, bytes]]:
        """Return new messages with the names of their senders. A sender may be unknown."""

    @abstractmethod
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
        for name in list(self._remotes):
            self.disconnect(name)

    @abstractmethod
    def _add(self, name: str, remote: Slots) -> None:
        """Connect to a rank; ValueError if its memory makes no sense here."""

    def _remove(self, name: str) -> None:  # noqa: B027 -- some hold nothing of a rank
        """Forget a rank."""

    def _remote(self, name: str) -> Slots:
        """Return a rank's memory; ConnectionError if it is not connected."""
        if name not in self._remotes:
            raise ConnectionError(f"{name} is not connected")
        return self._remotes[name]

    def _source_of(self, name: str, there: int, here: int, num_bytes: int) -> Slots:
        """Return the memory of the rank that a slot is read from.

        Raises:
            ConnectionError: The rank is not connected.
            ValueError: One end has no such slot, or a smaller one.
        """
        remote = self._remote(name)
        for end, slot in ((self._own, here), (remote, there)):
            if not 0 <= slot < end.num_slots or not 0 < num_bytes <= end.slot_bytes:
                slots = f"{end.num_slots} slots of {end.slot_bytes} bytes"
                raise ValueError(f"a read of {num_bytes} bytes of slot {slot}: there are {slots}")
        return remote
