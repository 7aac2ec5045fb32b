"""Reads between ranks of one world over torch.distributed, where NIXL is missing (`PointToPointTransport`)."""

import json
from itertools import count
from threading import Thread

import torch
import torch.distributed as dist
from torch import Tensor

from dcpmla.transfer.transport import Slots, Transport

_MESSAGE, _REQUEST = b"m", b"r"


class _Work:
    """A send or a receive under way."""

    def __init__(self, work: dist.Work, device: torch.device) -> None:
        self._work, self._thread = work, None if device.type == "cuda" else Thread(target=self._wait, daemon=True)
        self._error: Exception | None = None
        if self._thread is not None:  # gloo notices an end in a wait only
            self._thread.start()

    @property
    def is_done(self) -> bool:
        if self._thread is None:
            return self._work.is_completed()
        return not self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def _wait(self) -> None:
        try:
            self._work.wait()
        except Exception as error:  # the other rank has ended
            self._error = error


class PointToPointRead:
    """A read of a slot: a receive here, and a send that the other rank starts when it is asked to."""

    def __init__(self, work: _Work, transport: "PointToPointTransport", name: str, message: bytes) -> None:
        self._work, self._transport, self._name, self._message = work, transport, name, message
        self._is_done = self.has_failed = False

    @property
    def is_done(self) -> bool:
        if not self._is_done and self._work.is_done:
            self._is_done, self.has_failed = True, self._work.has_failed
            if not self.has_failed:
                try:
                    self._transport.send(self._name, self._message)
                except ConnectionError:  # disconnected meanwhile
                    self.has_failed = True
        return self._is_done


class PointToPointTransport(Transport):
    """A transport between ranks of one world. Slots move by sends and receives, messages through the world's store.

    The slot of a read from a rank that is lost stays in use; such a world ends.

    Args:
        name: Name of this rank (`rank_name`).
        memory: Staging memory [num_slots, slot_bytes] uint8.
        group: Group of all ranks for these sends and receives alone: gloo for memory of the host, else NCCL.
        store: Store of the world. No other thread waits in this client of it.
    """

    def __init__(self, name: str, memory: Tensor, group: dist.ProcessGroup, store: dist.Store) -> None:
        super().__init__(name, memory, Slots("", dist.get_rank(), *memory.shape))
        self._group, self._store = group, store
        self._sends: list[_Work] = []
        self._tags, self._num_received = count(), 0
        # On the default stream they would wait for the engine's work.
        self._stream = torch.cuda.Stream(memory.device) if memory.device.type == "cuda" else None

    def _add(self, name: str, remote: Slots) -> None:
        if not 0 <= remote.address < dist.get_world_size():
            raise ValueError(f"it is of rank {remote.address} of the world")

    def send(self, name: str, message: bytes) -> None:
        self._post(name, _MESSAGE + message)

    def receive(self) -> list[tuple[str, bytes]]:
        self._sends = [send for send in self._sends if not send.is_done]
        messages = []
        while self._store.check([key := _key(self._own.address, self._num_received + 1)]):
            name, _, text = self._store.get(key).decode().partition("\n")
            content = bytes.fromhex(text)
            self._store.delete_key(key)
            self._num_received += 1
            if content[:1] == _MESSAGE:
                messages.append((name, content[1:]))
            else:
                self._answer(*json.loads(content[1:]))
        return messages

    def read(self, name: str, there: int, here: int, num_bytes: int, message: bytes) -> PointToPointRead:
        remote = self._source_of(name, there, here, num_bytes)
        tag = next(self._tags)
        # Requests and receives have the same order, as NCCL needs.
        self._post(name, _REQUEST + json.dumps([self._own.address, there, num_bytes, tag]).encode())
        with torch.cuda.stream(self._stream):
            work = dist.irecv(self.memory[here, :num_bytes], remote.address, self._group, tag)
        assert work is not None
        return PointToPointRead(_Work(work, self.memory.device), self, name, message)

    def _answer(self, rank: int, slot: int, num_bytes: int, tag: int) -> None:
        """Send a slot's content to a rank that reads it."""
        with torch.cuda.stream(self._stream):
            work = dist.isend(self.memory[slot, :num_bytes], rank, self._group, tag)
        assert work is not None
        self._sends.append(_Work(work, self.memory.device))

    def _post(self, name: str, content: bytes) -> None:
        """Put a message into the store, where the rank finds it under the next number."""
        rank = self._remote(name).address
        try:
            number = self._store.add(_key(rank, 0), 1)
            self._store.set(_key(rank, number), f"{self._name}\n{content.hex()}")
        except (dist.DistError, OSError) as error:
            raise ConnectionError(f"{name} is lost with the store: {error}") from error


def _key(rank: int, number: int) -> str:
    """Return the key of a rank's message, from 1 on; number 0 is the counter."""
    return f"kv_transfer/{rank}/{number}"
