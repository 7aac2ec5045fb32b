"""A transport in memory whose messages are late and whose reads are slow and torn, under a virtual clock."""

from collections import deque
from random import Random

import torch
from torch import Tensor

_PIECES = 4  # of a read; the other rank may write between two of them


class Clock:
    """Time that passes when a test says so; it replaces the module `time`."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class Network:
    """Transports by name. A lost one answers nothing, and reads from it fail."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.transports: dict[str, FakeTransport] = {}
        self.lost: set[str] = set()
        self.num_reads = 0

    def new(self, name: str, num_slots: int, slot_bytes: int) -> "FakeTransport":
        self.transports[name] = transport = FakeTransport(self, name, num_slots, slot_bytes)
        return transport


class FakeRead:
    def __init__(self, network: Network, name: str, source: Tensor, target: Tensor, finish) -> None:
        self._network, self._name, self._finish = network, name, finish
        pieces = list(zip(source.chunk(_PIECES), target.chunk(_PIECES), strict=True))
        network.random.shuffle(pieces)
        self._pieces = deque(pieces)
        self._is_done = self.has_failed = False

    @property
    def is_done(self) -> bool:
        if self._is_done:
            return True
        if self._name in self._network.lost:
            self._is_done = self.has_failed = True
        for _ in range(self._network.random.randint(0, 3)):
            if self._pieces and not self._is_done:
                source, target = self._pieces.popleft()
                target.copy_(source)
        if not self._pieces and not self._is_done:
            self._is_done = True
            self._finish()
        return self._is_done


class FakeTransport:
    def __init__(self, network: Network, name: str, num_slots: int, slot_bytes: int) -> None:
        self._network, self.name = network, name
        self.memory = torch.randint(0, 255, (num_slots, slot_bytes), dtype=torch.uint8)
        self.inbox: deque[tuple[str, bytes]] = deque()
        self._connected: set[str] = set()

    def metadata(self) -> bytes:
        return self.name.encode()

    def connect(self, name: str, metadata: bytes) -> None:
        if metadata.decode() != name:
            raise ValueError("the metadata is another rank's")
        self._connected.add(name)

    def disconnect(self, name: str) -> None:
        self._connected.discard(name)

    def send(self, name: str, message: bytes) -> None:
        if name not in self._connected or (name in self._network.lost and self._network.random.random() < 0.3):
            raise ConnectionError(f"{name} is lost")
        self._network.transports[name].inbox.append((self.name, message))

    def receive(self) -> list[tuple[str, bytes]]:
        number = self._network.random.randint(0, len(self.inbox))
        return [self.inbox.popleft() for _ in range(number)]

    def read(self, name: str, there: int, here: int, num_bytes: int, message: bytes) -> FakeRead:
        if name not in self._connected:
            raise ConnectionError(f"{name} is not connected")
        other = self._network.transports[name]
        self._network.num_reads += 1

        def finish() -> None:
            other.inbox.append((self.name, message))

        return FakeRead(self._network, name, other.memory[there, :num_bytes], self.memory[here, :num_bytes], finish)

    def close(self) -> None:
        self._connected.clear()
