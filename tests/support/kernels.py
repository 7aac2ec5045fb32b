"""Checks of kernels on both devices that run them: a GPU, and Triton's interpreter on CPUs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.shared_memory import run_interpreted

# For tests that take a `device`: a CPU, and a GPU where there is one.
on_both = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def run_kernels(device: str, *checks: Callable[[str], None]) -> None:
    """Call check(device) of each: here on a GPU, else in Triton's interpreter, which converts numbers as GPUs do."""
    if device == "cuda":
        _run_checks(device, *checks)
    else:
        run_interpreted(1, _run_checks, device, *checks)


def _run_checks(device: str, *checks: Callable[[str], None]) -> None:
    if device == "cpu":
        from tests.support.assembler import interpret_assembler
        from tests.support.interpreter import convert_as_torch

        convert_as_torch()
        interpret_assembler()
    for check in checks:
        check(device)


@contextmanager
def nan_in_new_memory() -> Iterator[None]:
    """Fill the memory of new tensors with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def cut(x: Tensor) -> Tensor:
    """Return the same rows with NaN after each: a slice of something wider."""
    wide = x.new_full((*x.shape[:-1], x.shape[-1] + 8), torch.nan)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def on(device: str, x: Any) -> Any:
    """Copy tensors to a device with their strides, also in lists and tuples, named or not; return a list for a list."""
    if isinstance(x, Tensor):
        base = x if x._base is None else x._base
        return base.to(device, copy=True).as_strided(x.shape, x.stride(), x.storage_offset())
    if isinstance(x, list):
        return [on(device, each) for each in x]
    if isinstance(x, tuple):
        moved = [on(device, each) for each in x]
        return type(x)(*moved) if hasattr(x, "_fields") else tuple(moved)
    return x


def bytes_of(x: Tensor) -> Tensor:
    """Return a tensor's bytes on the host, in the order of its indices."""
    return x.cpu().contiguous().view(torch.uint8)
