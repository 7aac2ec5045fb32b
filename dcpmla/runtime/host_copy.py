"""Copies of tensors to the host, which nothing waits for until they are read (`HostCopy`)."""

import torch
from torch import Tensor


class HostCopy:
    """A tensor of whole numbers on its way to the host, after the device's work so far.

    Args:
        tensor: Tensor [n].
    """

    def __init__(self, tensor: Tensor) -> None:
        self._numbers = tensor.to("cpu", non_blocking=True)  # pinned memory, from a GPU
        self._done = torch.cuda.Event() if tensor.is_cuda else None  # the CPU is done already
        if self._done is not None:
            self._done.record()

    @property
    def is_done(self) -> bool:
        """Return whether the numbers are here."""
        return self._done is None or self._done.query()

    def wait(self) -> list[int]:
        """Wait for the work before the copy, and for no later one, and return the numbers."""
        if self._done is not None:
            self._done.synchronize()
        numbers: list[int] = self._numbers.tolist()
        return numbers
