"""Reads between jobs over NIXL: shared memory, CUDA IPC, RDMA or TCP, as UCX finds them (`NixlTransport`)."""

import logging
import os
from base64 import b64decode, b64encode
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

from torch import Tensor

from dcpmla.transfer.transport import Slots, Transport


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


class NixlTransport(Transport):
    """A transport over NIXL's UCX backend. It registers the staging memory alone.

    NIXL's own thread would poll without a pause, so `receive` and the reads do its work: they are called often.

    Args:
        name: Name of this rank (`rank_name`).
        memory: Staging memory [num_slots, slot_bytes] uint8.
    Raises:
        OSError: NIXL cannot use the network or the memory.
    """

    def __init__(self, name: str, memory: Tensor) -> None:
        if memory.device.type == "cuda":
            # By itself UCX reads by CUDA IPC only where the driver names NVLinks, which it does not in many virtual
            # machines; reads between two GPUs of a host go through its processors then.
            os.environ.setdefault("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "y")
        try:
            config = _api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            self._agent = _api.nixl_agent(name, config)
            self._registered = self._agent.register_memory(memory)
            agent = self._agent.get_agent_metadata()
        except Exception as error:
            raise OSError(f"NIXL does not start on this host: {type(error).__name__}: {error}") from error
        kind = "VRAM" if memory.device.type == "cuda" else "DRAM"  # NIXL's names
        place = memory.data_ptr(), *memory.shape, kind, memory.device.index or 0
        super().__init__(name, memory, Slots(b64encode(agent).decode(), *place))

    def _add(self, name: str, remote: Slots) -> None:
        if remote.kind not in ("DRAM", "VRAM"):
            raise ValueError("its fields have other types")
        if (known := self._agent.add_remote_agent(b64decode(remote.agent, validate=True))) not in (name, name.encode()):
            self._agent.remove_remote_agent(known)
            raise ValueError("its agent has another name")

    def _remove(self, name: str) -> None:
        with suppress(Exception):  # it may be lost already
            self._agent.remove_remote_agent(name)

    def send(self, name: str, message: bytes) -> None:
        self._remote(name)
        try:
            self._agent.send_notif(name, message)
        except Exception as error:
            raise ConnectionError(f"{name} is lost: {type(error).__name__}") from error

    def receive(self) -> list[tuple[str, bytes]]:
        messages = self._agent.get_new_notifs()
        return [(name, message) for name, content in messages.items() for message in content]

    def read(self, name: str, there: int, here: int, num_bytes: int, message: bytes) -> NixlRead:
        remote = self._source_of(name, there, here, num_bytes)
        try:
            own, other = (
                self._agent.get_xfer_descs([(end.address + slot * end.slot_bytes, num_bytes, end.device)], end.kind)
                for end, slot in ((self._own, here), (remote, there))
            )
            return NixlRead(self._agent, self._agent.initialize_xfer("READ", own, other, name, message))
        except Exception as error:
            raise ConnectionError(f"{name} is lost: {type(error).__name__}") from error

    def close(self) -> None:
        super().close()
        with suppress(Exception):
            self._agent.deregister_memory(self._registered)
