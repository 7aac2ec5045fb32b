"""Attention kernels by capability: a backend is a pair of functions, and the best one that can run is taken."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dcpmla.attention import reference


class Decode(Protocol):
    def __call__(
        self, q: Tensor, kv_cache: Tensor, block_table: Tensor, seq_lens: Tensor, scale: float, kv_lora_rank: int
    ) -> tuple[Tensor, Tensor]:
        """See `dcpmla.mla_decode`; arguments are checked already."""


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
class AttentionBackend:
    """A pair of kernels with the devices they run on."""

    name: str
    decode: Decode
    prefill: Prefill
    device_types: tuple[str, ...]


# Best first.
_BACKENDS = (AttentionBackend("torch", reference.mla_decode, reference.mha_prefill, ("cpu", "cuda")),)


def select_backend(device: torch.device) -> AttentionBackend:
    """The first backend that runs on a device.

    Raises:
        ValueError: none does.
    """
    for backend in _BACKENDS:
        if device.type in backend.device_types:
            return backend
    raise ValueError(f"device is {device}; attention backends exist for {sorted({t for b in _BACKENDS for t in b.device_types})}")
