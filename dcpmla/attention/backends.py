"""Decode kernels by capability: the first that takes the inputs runs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dcpmla.attention import reference

_HALF = (torch.bfloat16, torch.float16)


class Decode(Protocol):
    def __call__(
        self,
        q: Tensor,
        kv_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        scale: float,
        kv_lora_rank: int,
        query_start_loc: Tensor | None,
        max_query_len: int,
        workspace: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """See `dcpmla.mla_decode`; arguments are checked already."""


@dataclass(frozen=True)
class DecodeBackend:
    """A decode kernel and what it takes.

    Attributes:
        takes: whether it runs on the device, dtypes and sizes of (q, kv_cache, kv_lora_rank).
        load: gives the kernel, importing what only it needs.
    """

    name: str
    takes: Callable[[Tensor, Tensor, int], bool]
    load: Callable[[], Decode]


def _takes_torch(q: Tensor, kv_cache: Tensor, kv_lora_rank: int) -> bool:
    return q.device.type in ("cpu", "cuda")


def _load_torch() -> Decode:
    return reference.mla_decode


# Best first.
DECODE_BACKENDS = (DecodeBackend("torch", _takes_torch, _load_torch),)


def select_decode(q: Tensor, kv_cache: Tensor, kv_lora_rank: int) -> DecodeBackend:
    """The first backend that takes the inputs.

    Raises:
        ValueError: none does.
    """
    for backend in DECODE_BACKENDS:
        if backend.takes(q, kv_cache, kv_lora_rank):
            return backend
    raise ValueError(f"q is on device {q.device}; decode kernels exist for 'cpu', 'cuda'")
