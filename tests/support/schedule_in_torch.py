"""The schedule of the Hopper decode kernels, run in torch: pointers, loads, stores and atomic additions."""

from collections import Counter
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

ROWS, LATENT, HALF = 4, 4, 2  # the least sizes that the schedule distinguishes; a tile has one key
MOST_PARTS = 14


class Pointer:
    """An element of a flat tensor, or a tensor of elements."""

    def __init__(self, memory: Tensor, index: Tensor | int = 0) -> None:
        self.memory, self.index, self.dtype = memory, index, SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, offset: Tensor | int) -> "Pointer":
        return Pointer(self.memory, self.index + offset)

    def at(self, mask: Tensor) -> Tensor:
        index = torch.as_tensor(self.index)
        return torch.where(mask, index, 0).long() if mask.ndim else index.long()


def _load(pointer: Pointer, mask: Tensor | None = None, other: float = 0.0) -> Tensor:
    mask = torch.tensor(True) if mask is None else mask
    values = pointer.memory[pointer.at(mask)]
    return torch.where(mask, values, torch.tensor(other, dtype=values.dtype))


def _store(pointer: Pointer, values: Tensor | int, mask: Tensor | bool = True) -> None:
    index, values, mask = torch.broadcast_tensors(*map(torch.as_tensor, (pointer.index, values, mask)))
    pointer.memory[index[mask].long()] = values[mask].to(pointer.memory.dtype)


def _add_atomically(pointer: Pointer, value: int, **_: str) -> Tensor:
    old = pointer.memory[pointer.index].clone()
    pointer.memory[pointer.index] += value
    return old


def _pair(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Tensor]:
    return lambda left, right: function(torch.as_tensor(left), torch.as_tensor(right))


def _struct(kind: type) -> Callable[..., SimpleNamespace]:
    return lambda *values: SimpleNamespace(**dict(zip(kind.__annotations__, values, strict=True)))


def schedule_in_torch(grid: tuple[int, int]) -> SimpleNamespace:
    """Return the functions of the kernel's schedule, outputs and merge over torch tensors, as in a grid of programs.

    `program` is the present one.
    """
    from dcpmla.attention.hopper import merge, outputs, partials, pipeline, schedule

    program = [0, 0]
    language = SimpleNamespace(
        int32=torch.int32,
        int64=torch.int64,
        float32=torch.float32,
        constexpr=None,
        BlockedLayout=lambda *_: None,
        SliceLayout=lambda *_: None,
        arange=lambda start, end, layout: torch.arange(start, end),
        zeros=lambda shape, *_: torch.zeros(shape),
        full=lambda shape, value, *_: torch.full(shape, value),
        minimum=_pair(torch.minimum),
        maximum=_pair(torch.maximum),
        to_tensor=torch.tensor,
        cdiv=lambda number, divisor: (number + divisor - 1) // divisor,
        where=lambda mask, left, right: torch.where(torch.as_tensor(mask), left, right),
        associative_scan=lambda values, axis, _: values.cumsum(axis),
        max=lambda values, axis: values.amax(axis),
        sum=lambda values, axis: values.sum(axis),
        expand_dims=lambda values, axis: values.unsqueeze(axis),
        convert_layout=lambda values, _: values,
        log2=torch.log2,
        load=_load,
        store=_store,
        atomic_add=_add_atomically,
        program_id=lambda axis: program[axis],
        num_programs=lambda axis: grid[axis],
    )
    functions = {
        name: value for module in (pipeline, schedule, partials, outputs, merge) for name, value in vars(module).items()
    }
    values = {name: getattr(value, "value", value) for name, value in functions.items()}
    names: dict[str, Any] = {
        **values,
        "gl": language,
        "ROWS": ROWS,
        "KEYS": 1,
        "LATENT": LATENT,
        "HALF": HALF,
        "GROUP": 1,
        "Work": SimpleNamespace,
        **{name: _struct(getattr(schedule, name)) for name in ("Batch", "Walk", "Segment")},
    }
    for name, value in functions.items():
        if hasattr(value, "fn"):
            names[name] = FunctionType(value.fn.__code__, names)
    names |= {
        "barrier": lambda: None,
        "exp2": torch.exp2,
        "uniform": lambda number: number,
        "_in_order": lambda rows, _: rows,
    }
    names |= {
        "_read": _reader(),
        "mbarrier": SimpleNamespace(arrive=lambda opened, count: opened.append(count), wait=_check_open),
    }
    return SimpleNamespace(**names, program=program)


def _reader() -> Callable[[Pointer], Tensor]:
    """Return a reader of counters; a loop that goes on reading one is waiting for parts that never arrive."""
    reads = Counter[int]()

    def read(counter: Pointer) -> Tensor:
        reads[int(counter.index)] += 1
        assert reads[int(counter.index)] <= 2 * MOST_PARTS, "waits for parts that never arrive"
        return counter.memory[counter.index].clone()

    return read


def _check_open(opened: list[int], phase: int) -> None:
    assert (len(opened), phase) == (1, 0), "a merge that no one opened, or opened twice"
