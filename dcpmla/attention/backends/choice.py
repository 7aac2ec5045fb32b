"""Attention kernels by capability: two tables; the first backend in a table that supports a call runs it."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import Generic, TypeVar

import torch
from torch import Tensor

from dcpmla.attention.backends import flashinfer, obstacles, reference
from dcpmla.attention.backends.calls import DecodeCall, PrefillCall
from dcpmla.config import DCPConfig
from dcpmla.operators import import_kernel

Call = TypeVar("Call", DecodeCall, PrefillCall)
Run = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Backend(Generic[Call]):
    """A kernel of one phase, and the calls that it supports.

    Attributes:
        obstacle: Function that returns why the backend does not support a call, or "". With needs_gpu it is asked only
            about calls on GPUs.
        run: Function that computes (out, lse); it imports the modules that only this kernel needs.
        sends_rows: Whether `run` of decode also takes a `Mailbox`: it then stores each finished row at the rank that
            owns the row's head, and returns this rank's heads, merged from all ranks' rows.
        joins_keys: Whether `run` of prefill copies k_nope and k_pe into one tensor (`join_keys`).
        needs_gpu: Whether the backend supports no calls on other devices than GPUs.
    """

    name: str
    obstacle: Callable[[Call], str]
    run: Run
    sends_rows: bool = False
    joins_keys: bool = False
    needs_gpu: bool = False

    def obstacle_to(self, call: Call) -> str:
        """Return why the backend cannot run the call, or ""."""
        if self.needs_gpu and not call.q.is_cuda:
            return f"q is on device {call.q.device}, not a GPU"
        return self.obstacle(call)


def select_backend(table: list[Backend[Call]], call: Call) -> Backend[Call]:
    """Return the first backend of a table that supports the call, or the backend that the call names.

    Raises:
        ValueError: No backend has that name, the named one does not support the call, or none does.
    """
    if call.backend != "auto":
        backend = find_backend(table, call.backend)
        if obstacle := backend.obstacle_to(call):
            raise ValueError(f"backend is {call.backend!r}, which does not take this call: {obstacle}; choose 'auto'")
        return backend
    for backend in table:
        if not backend.obstacle_to(call):
            return backend
    obstacles = "; ".join(f"{name}: {obstacle}" for name, obstacle in passed_over(table, call).items())
    raise ValueError(f"no backend takes this call: {obstacles}")


def find_backend(table: list[Backend[Call]], name: str, argument: str = "backend") -> Backend[Call]:
    """Return the backend of a name.

    Args:
        argument: Name of the argument that holds `name`, for the error.
    Raises:
        ValueError: The table has no such backend.
    """
    for backend in table:
        if backend.name == name:
            return backend
    raise ValueError(f"{argument} is {name!r}; expected 'auto' or one of {', '.join(each.name for each in table)}")


def passed_over(table: list[Backend[Call]], call: Call) -> dict[str, str]:
    """Return the obstacle of each backend before the first one that supports the call, by name; all if none does."""
    found = {backend.name: backend.obstacle_to(call) for backend in table}
    return dict(takewhile(lambda item: item[1], found.items()))


def register_backend(table: list[Backend[Call]], backend: Backend[Call]) -> None:
    """Insert a custom backend first in a table: DECODE_BACKENDS or PREFILL_BACKENDS.

    Raises:
        ValueError: The table has a backend of that name, or the name is "auto".
    """
    if backend.name in ("auto", *(each.name for each in table)):
        raise ValueError(f"backend.name is {backend.name!r}; it must be new to the table, and not 'auto'")
    table.insert(0, backend)


def _device_obstacle(call: DecodeCall | PrefillCall) -> str:
    return "" if call.q.device.type in ("cpu", "cuda") else f"q is on device {call.q.device}, not 'cpu' or 'cuda'"


def _kernel(name: str) -> Run:
    """Return a function that imports the kernel's launcher when it runs."""
    return lambda *args: import_kernel(name)(*args)


def _decode_kernel(folder: str) -> Run:
    """Return a function that imports the launcher for a call's order when it runs."""
    names = [f"dcpmla.attention.{folder}.{order}decode:run" for order in ("", "deterministic_")]
    return lambda call, *args: import_kernel(names[call.num_tile_lanes is not None])(call, *args)


# Best first. Triton exists on Linux only, so kernels are imported when they run.
DECODE_BACKENDS: list[Backend[DecodeCall]] = [
    Backend("hopper", obstacles.hopper_decode, _decode_kernel("hopper"), sends_rows=True, needs_gpu=True),
    Backend("triton", obstacles.triton_decode, _decode_kernel("triton"), needs_gpu=True),
    Backend("torch", _device_obstacle, reference.mla_decode),
]
# Best first, by `bench prefill`. cuDNN is missing because torch up to 2.13 plans each ragged call anew, in 45 ms.
PREFILL_BACKENDS: list[Backend[PrefillCall]] = [
    Backend("hopper", obstacles.hopper_prefill, _kernel("dcpmla.attention.hopper.prefill:run"), needs_gpu=True),
    Backend("flashinfer", obstacles.flashinfer_prefill, flashinfer.run_prefill, joins_keys=True, needs_gpu=True),
    Backend("triton", obstacles.triton_prefill, _kernel("dcpmla.attention.triton.prefill:run"), needs_gpu=True),
    Backend("torch", _device_obstacle, reference.run_prefill, joins_keys=True),
]


def check_backends(dcp: DCPConfig, device: torch.device | None = None) -> None:
    """Raise ValueError for a named backend that is not in its table or does not run on the device."""
    _check_backend(DECODE_BACKENDS, dcp.attention_backend, "attention_backend (--attention-backend)", device)
    _check_backend(PREFILL_BACKENDS, dcp.prefill_backend, "prefill_backend (--prefill-backend)", device)


def _check_backend(table: list[Backend[Call]], name: str, argument: str, device: torch.device | None) -> None:
    if name != "auto" and find_backend(table, name, argument).needs_gpu and device is not None and device.type == "cpu":
        others = ", ".join(backend.name for backend in table if not backend.needs_gpu)
        raise ValueError(f"{argument} is {name!r}, which needs a GPU; on CPUs choose 'auto' or one of {others}")
