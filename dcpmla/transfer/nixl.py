"""Reads between jobs over NIXL: shared memory, CUDA IPC, RDMA or TCP, as UCX finds them (`NixlTransport`)."""

import json
import logging
from base64 import b64decode, b64encode
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any, NamedTuple

from torch import Tensor

from dcpmla.transfer.transport import check_slots


def _load() -> Any:
    """Import NIXL's interface, and undo what its import does to the process's logging.

    Raises:
        ImportError: It is not installed.
    """
    raise_exceptions = logging.raiseExceptions
    try:
        try:
            return import_module("nixl._api")
        except ModuleNotFoundError:  # the package for one version of CUDA comes alone, too
            for name in ("nixl_cu13", "nixl_cu12"):
                with suppress(ModuleNotFoundError):
                    return import_module(f"{name}._api")
            raise
    finally:
        logging.raiseExceptions = raise_exceptions
        logger = logging.getLogger("nixl")
        logger.handlers.clear()  # they print to stdout
        logger.propagate = True
        logger.setLevel(logging.WARNING)


_api = _load()


class _Remote(NamedTuple):
    """The staging memory of another rank."""

    address: int
    num_slots: int
    slot_bytes: int
    kind: str
    device: int


class NixlRead:
    """A read of a slot. NIXL goes on with it when it is asked for its state."""

    def __init__(self, agent: Any, handle: Any) -> None:
        self._agent, self._handle = agent, handle
        self.has_failed = False
        self._ask(agent.transfer)

    @property
    def is_done(self) -> bool:
        if self._handle is not None:
            self._ask(self._agent.check_xfer_state)
        return self._handle is None

    def _ask(self, function: Callable[[Any], str]) -> None:
        """Ask NIXL for the read's state, and release it after its end."""
        try:
            state = function(self._handle)
        except Exception:  # the rank is lost, or was disconnected
            state = "ERR"
        if state == "PROC":
            return
        self.has_failed = state != "DONE"
        with suppress(Exception):  # the handle is released with the agent then
            self._handle.release()
        self._handle = None


class NixlTransport:
    """A transport over NIXL's UCX backend. It registers the staging memory alone.

    NIXL's own thread would poll without a pause, so `receive` and the reads do its work: they are called often.

    Args:
        name: Name of this rank (`rank_name`).
        memory: Staging memory [num_slots, slot_bytes] uint8.
    Raises:
        OSError: NIXL cannot use the network or the memory.
    """

    def __init__(self, name: str, memory: Tensor) -> None:
        self.memory = memory
        self._is_cuda = memory.device.type == "cuda"
        try:
            config = _api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            self._agent = _api.nixl_agent(name, config)
            self._registered = self._agent.register_memory(memory)
            agent = self._agent.get_agent_metadata()
        except Exception as error:
            raise OSError(f"NIXL does not start on this host: {type(error).__name__}: {error}") from error
        self._own = _Remote(memory.data_ptr(), len(memory), memory.shape[1], self._kind, memory.device.index or 0)
        fields = {"name": name, "agent": b64encode(agent).decode(), **self._own._asdict()}
        self._metadata = json.dumps(fields).encode()
        self._remotes: dict[str, _Remote] = {}

    @property
    def _kind(self) -> str:
        """Return NIXL's name of the memory's kind."""
        return "VRAM" if self._is_cuda else "DRAM"

    def metadata(self) -> bytes:
        return self._metadata

    def connect(self, name: str, metadata: bytes) -> None:
        if name in self._remotes:
            raise ValueError(f"{name} is connected already")
        try:
            fields = json.loads(metadata)
            agent = b64decode(fields.pop("agent"), validate=True)
            if fields.pop("name") != name:
                raise ValueError("it is another rank's")
            remote = _Remote(**fields)
            if [type(field) for field in remote] != [int, int, int, str, int] or remote.kind not in ("DRAM", "VRAM"):
                raise ValueError("its fields have other types")
            if (known := self._agent.add_remote_agent(agent)) not in (name, name.encode()):
                self._agent.remove_remote_agent(known)
                raise ValueError("its agent has another name")
        except Exception as error:
            raise ValueError(f"the metadata of {name} is wrong: {type(error).__name__}: {error}") from error
        self._remotes[name] = remote

    def disconnect(self, name: str) -> None:
        if self._remotes.pop(name, None) is not None:
            with suppress(Exception):  # it may be lost already
                self._agent.remove_remote_agent(name)

    def send(self, name: str, message: bytes) -> None:
        self._check(name)
        try:
            self._agent.send_notif(name, message)
        except Exception as error:
            raise ConnectionError(f"{name} is lost: {type(error).__name__}") from error

    def receive(self) -> list[tuple[str, bytes]]:
        messages = self._agent.get_new_notifs()
        return [(name, message) for name, content in messages.items() for message in content]

    def read(self, name: str, there: int, here: int, num_bytes: int, message: bytes) -> NixlRead:
        remote = self._check(name)
        ends = (self._own, here), (remote, there)
        sizes, slots, numbers = zip(*((end.slot_bytes, slot, end.num_slots) for end, slot in ends), strict=True)
        check_slots(sizes, slots, numbers, num_bytes)
        try:
            own, other = (
                self._agent.get_xfer_descs([(end.address + slot * end.slot_bytes, num_bytes, end.device)], end.kind)
                for end, slot in ends
            )
            return NixlRead(self._agent, self._agent.initialize_xfer("READ", own, other, name, message))
        except Exception as error:
            raise ConnectionError(f"{name} is lost: {type(error).__name__}") from error

    def close(self) -> None:
        for name in list(self._remotes):
            self.disconnect(name)
        with suppress(Exception):
            self._agent.deregister_memory(self._registered)

    def _check(self, name: str) -> _Remote:
        """Return a rank's memory; ConnectionError if it is not connected."""
        if name not in self._remotes:
            raise ConnectionError(f"{name} is not connected")
        return self._remotes[name]
