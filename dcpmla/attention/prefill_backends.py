"""Prefill kernels by capability: the first that takes the inputs runs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dcpmla.attention import prefill_flashinfer, reference
from dcpmla.attention.backends import has_flashinfer
from dcpmla.attention.projections import join_keys
from dcpmla.attention.step import Segments

_HALF = (torch.bfloat16, torch.float16)


class Prefill(Protocol):
    def __call__(
        self,
        q: Tensor,
        k_nope: Tensor,
        k_pe: Tensor,
        v: Tensor,
        queries: Segments,
        keys: Segments,
        scale: float,
        causal: bool,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Multi-head attention of a ragged batch.

        Args:
            q: [T, h, P + R].
            k_nope, k_pe, v: [S, h, P], [S, R], [S, h, V] with S > 0; every head's key is its part of k_nope, then
                k_pe. Views with any strides but contiguous columns.
            queries, keys: the requests' rows in T, in S.
            causal: query j of a request sees its first j + 1 keys (there are as many keys as queries); else all.
            mask: [T, W] int32 from `selection_mask`, contiguous: which of those a query sees; None for all.
        Returns:
            out [T, h, V] in the dtype of q, lse [T, h] float32 natural log, contiguous; (0, -inf) for a query that
            sees no key.
        """


@dataclass(frozen=True)
class PrefillBackend:
    """A prefill kernel and what it takes.

    Attributes:
        takes: whether it runs on the device, dtypes and sizes of (q, k_pe, v).
        load: gives the kernel, importing what only it needs.
        takes_mask: whether it takes a mask.
        joins_keys: whether it copies keys, to have k_nope and k_pe in one tensor (`join_keys`).
    """

    name: str
    takes: Callable[[Tensor, Tensor, Tensor], bool]
    load: Callable[[], Prefill]
    takes_mask: bool = True
    joins_keys: bool = False


# ---- plain torch


def _takes_torch(q: Tensor, k_pe: Tensor, v: Tensor) -> bool:
    return q.device.type in ("cpu", "cuda")


def _load_torch() -> Prefill:
    return _torch


def _torch(
    q: Tensor,
    k_nope: Tensor,
    k_pe: Tensor,
    v: Tensor,
    queries: Segments,
    keys: Segments,
    scale: float,
    causal: bool,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return reference.mha_prefill(q, join_keys(k_nope, k_pe), v, queries.start, keys.start, scale, causal, mask)


# ---- our Triton kernel


def _takes_triton(q: Tensor, k_pe: Tensor, v: Tensor) -> bool:
    return _is_half_on_gpu(q, (8, 0)) and k_pe.shape[-1] > 0 and max(q.shape[-1], v.shape[-1]) <= 256


def _load_triton() -> Prefill:
    from dcpmla.attention.triton.prefill import mha_prefill  # triton is there on Linux only

    return mha_prefill


# ---- FlashInfer's


def _takes_flashinfer(q: Tensor, k_pe: Tensor, v: Tensor) -> bool:
    dims = (q.shape[-1], v.shape[-1])
    return _is_half_on_gpu(q, (9, 0)) and dims in prefill_flashinfer.HEAD_DIMS and has_flashinfer()


def _load_flashinfer() -> Prefill:
    return prefill_flashinfer.mha_prefill


# ---- the choice


def _is_half_on_gpu(q: Tensor, capability: tuple[int, int]) -> bool:
    return (
        q.is_cuda
        and q.dtype in _HALF
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(q.device) >= capability
    )


# Best first, by `bench prefill`. cuDNN's is not among them: torch up to 2.13 plans it anew in each ragged call, for 45
# ms.
PREFILL_BACKENDS = (
    PrefillBackend("flashinfer", _takes_flashinfer, _load_flashinfer, takes_mask=False, joins_keys=True),
    PrefillBackend("triton", _takes_triton, _load_triton),
    PrefillBackend("torch", _takes_torch, _load_torch, joins_keys=True),
)


def select_prefill(q: Tensor, k_pe: Tensor, v: Tensor, has_mask: bool = False) -> PrefillBackend:
    """The first backend that takes queries, keys and values, and a mask if there is one.

    Raises:
        ValueError: none does.
    """
    for backend in PREFILL_BACKENDS:
        if backend.takes(q, k_pe, v) and (backend.takes_mask or not has_mask):
            return backend
    raise ValueError(f"q is on device {q.device}; prefill kernels exist for 'cpu', 'cuda'")
