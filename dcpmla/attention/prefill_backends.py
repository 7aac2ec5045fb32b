"""Prefill kernels by capability: the first that runs on the device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dcpmla.attention import reference


class Prefill(Protocol):
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, query_start: Sequence[int], key_start: Sequence[int], scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Multi-head attention of a ragged batch.

        Args:
            q: [T, h, P + R], the queries of request i at [query_start[i], query_start[i + 1]).
            k, v: [S, h, P + R], [S, h, V], the keys of request i at [key_start[i], key_start[i + 1]).
            causal: query j of a request sees its first j + 1 keys (there are as many keys as queries); else all.
        Returns:
            out [T, h, V] in the dtype of q, lse [T, h] float32 natural log; (0, -inf) for a request without keys.
        """


@dataclass(frozen=True)
class PrefillBackend:
    """A prefill kernel with the devices it runs on."""

    name: str
    prefill: Prefill
    device_types: tuple[str, ...]


# Best first.
PREFILL_BACKENDS = (PrefillBackend("torch", reference.mha_prefill, ("cpu", "cuda")),)


def select_prefill(device: torch.device) -> PrefillBackend:
    """The first backend that runs on a device.

    Raises:
        ValueError: none does.
    """
    for backend in PREFILL_BACKENDS:
        if device.type in backend.device_types:
            return backend
    raise ValueError(f"device is {device}; prefill kernels exist for {sorted({t for b in PREFILL_BACKENDS for t in b.device_types})}")
