"""Decode kernels by capability: the first that takes the inputs runs."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from dcpmla.attention import decode_flashinfer, reference
from dcpmla.cache import formats


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
        kv_scale: Tensor | None,
        q_scale: Tensor | None,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """See `dcpmla.mla_decode`; arguments are checked already."""


class SendDecode(Protocol):
    def __call__(
        self,
        q: Tensor,
        kv_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        scale: float,
        workspace: Tensor | None,
        kv_scale: Tensor | None,
        q_scale: Tensor | None,
        dtype: torch.dtype,
        addresses: Tensor,
        state: Tensor,
        rank: int,
        landing_bytes: int,
    ) -> None:
        """`Decode` of one query token a request, whose rows go into the landings of `comm.kernels.landings`."""


@dataclass(frozen=True)
class DecodeBackend:
    """A decode kernel and what it takes.

    Attributes:
        takes: whether it runs on the device, dtypes and sizes of (q, kv_cache, kv_lora_rank, the output's dtype).
        load: gives the kernel, importing what only it needs.
        load_sender: gives its form that stores rows at the ranks that own their heads, if it has one.
    """

    name: str
    takes: Callable[[Tensor, Tensor, int, torch.dtype], bool]
    load: Callable[[], Decode]
    load_sender: Callable[[], SendDecode] | None = None


def _takes_hopper(q: Tensor, kv_cache: Tensor, kv_lora_rank: int, dtype: torch.dtype) -> bool:
    return _is_half(q, kv_cache) and _suits_hopper(q, kv_cache, kv_lora_rank, dtype) and _is_tiled(kv_cache)


def _takes_hopper_sparse(q: Tensor, kv_cache: Tensor, kv_lora_rank: int, dtype: torch.dtype) -> bool:
    return _is_half(q, kv_cache) and _suits_hopper(q, kv_cache, kv_lora_rank, dtype) and _is_sparse(kv_cache)


def _takes_hopper_fp8(q: Tensor, kv_cache: Tensor, kv_lora_rank: int, dtype: torch.dtype) -> bool:
    return (
        q.dtype == kv_cache.dtype == formats.FP8
        and _suits_hopper(q, kv_cache, kv_lora_rank, dtype)
        and _is_tiled(kv_cache)
    )


def _takes_hopper_8bit(q: Tensor, kv_cache: Tensor, kv_lora_rank: int, dtype: torch.dtype) -> bool:
    is_8bit = q.dtype == dtype and kv_cache.dtype != dtype
    return is_8bit and _suits_hopper(q, kv_cache, kv_lora_rank, dtype) and (_is_tiled(kv_cache) or _is_sparse(kv_cache))


def _suits_hopper(q: Tensor, kv_cache: Tensor, kv_lora_rank: int, dtype: torch.dtype) -> bool:
    """sm_90, DeepSeek's widths, and rows that start where TMA and loads of 16 bytes want it."""
    row_stride = kv_cache.stride(0 if _is_sparse(kv_cache) else 1)
    strides = *(stride * q.element_size() for stride in q.stride()[:2]), row_stride * kv_cache.element_size()
    return (
        _takes_triton(q, kv_cache, kv_lora_rank, dtype)
        and torch.cuda.get_device_capability(q.device)[0] == 9
        and (kv_lora_rank, q.shape[-1]) == (512, 576)
        and all(number % 16 == 0 for number in (q.data_ptr(), kv_cache.data_ptr()))
        and all(stride > 0 and stride % 16 == 0 for stride in strides)
    )


def _is_tiled(kv_cache: Tensor) -> bool:
    """Whole tiles of 64 keys in a block, and strides that make the cache one matrix, as TMA wants it."""
    rows_per_block, rest = divmod(kv_cache.stride(0), kv_cache.stride(1)) if kv_cache.stride(1) else (0, 0)
    return kv_cache.shape[1] % 64 == rest == 0 and 0 < kv_cache.shape[0] * rows_per_block < 2**31


def _is_sparse(kv_cache: Tensor) -> bool:
    """Pages of one row."""
    return kv_cache.shape[1] == 1


def _load_hopper() -> Decode:
    from dcpmla.attention.hopper.decode import mla_decode

    return mla_decode


def _load_hopper_sender() -> SendDecode:
    from dcpmla.attention.hopper.decode import send_mla_decode

    return send_mla_decode


def _load_hopper_sparse() -> Decode:
    from dcpmla.attention.hopper.decode_sparse import mla_decode

    return mla_decode


def _load_hopper_sparse_sender() -> SendDecode:
    from dcpmla.attention.hopper.decode_sparse import send_mla_decode

    return send_mla_decode


def _load_hopper_fp8() -> Decode:
    from dcpmla.attention.hopper.decode_fp8 import mla_decode

    return mla_decode


def _load_hopper_fp8_sender() -> SendDecode:
    from dcpmla.attention.hopper.decode_fp8 import send_mla_decode

    return send_mla_decode


def _load_hopper_8bit() -> Decode:
    from dcpmla.attention.hopper.decode_8bit import mla_decode

    return mla_decode


def _load_hopper_8bit_sender() -> SendDecode:
    from dcpmla.attention.hopper.decode_8bit import send_mla_decode

    return send_mla_decode


def _takes_triton(q: Tensor, kv_cache: Tensor, kv_lora_rank: int, dtype: torch.dtype) -> bool:
    """Half precision on sm_80 or later, 8-bit formats on sm_89 or later; widths that are powers of two and fit into
    registers.
    """
    widths = kv_lora_rank, q.shape[-1] - kv_lora_rank
    return (
        q.is_cuda
        and torch.cuda.get_device_capability(q.device)
        >= ((8, 0) if _is_half(q, kv_cache) else (8, 9))  # that converts e4m3
        and dtype in (torch.bfloat16, torch.float16)
        and q.dtype in (dtype, formats.FP8)
        and kv_cache.dtype in (q.dtype, formats.FP8, torch.uint8)
        and all(16 <= width <= 512 and width & (width - 1) == 0 for width in widths)
        and q.stride(-1) == kv_cache.stride(-1) == 1
        and (kv_cache.dtype != torch.uint8 or _is_aligned(kv_cache))
    )


def _is_half(q: Tensor, kv_cache: Tensor) -> bool:
    return q.dtype == kv_cache.dtype and q.dtype in (torch.bfloat16, torch.float16)


def _is_aligned(kv_cache: Tensor) -> bool:
    """Whether the float32 and bfloat16 parts of rows of fp8_ds_mla stand where a load may start."""
    return all(stride % 4 == 0 for stride in kv_cache.stride()[:2]) and kv_cache.data_ptr() % 4 == 0


def _load_triton() -> Decode:
    from dcpmla.attention.triton.decode import mla_decode

    return mla_decode


def _takes_flashinfer(q: Tensor, kv_cache: Tensor, kv_lora_rank: int, dtype: torch.dtype) -> bool:
    return (
        _is_half(q, kv_cache)
        and _takes_triton(q, kv_cache, kv_lora_rank, dtype)
        and torch.cuda.get_device_capability(q.device)[0] == 9
        and (kv_lora_rank, q.shape[-1] - kv_lora_rank) == decode_flashinfer.WIDTHS
        and has_flashinfer()
    )


@cache
def has_flashinfer() -> bool:
    return find_spec("flashinfer") is not None


def _load_flashinfer() -> Decode:
    return decode_flashinfer.mla_decode


def _takes_torch(q: Tensor, kv_cache: Tensor, kv_lora_rank: int, dtype: torch.dtype) -> bool:
    return q.device.type in ("cpu", "cuda")


def _load_torch() -> Decode:
    return reference.mla_decode


# Best first. Triton is there on Linux only, so its kernels are imported when one is chosen.
DECODE_BACKENDS = (
    DecodeBackend("hopper", _takes_hopper, _load_hopper, _load_hopper_sender),
    DecodeBackend("hopper-sparse", _takes_hopper_sparse, _load_hopper_sparse, _load_hopper_sparse_sender),
    DecodeBackend("hopper-fp8", _takes_hopper_fp8, _load_hopper_fp8, _load_hopper_fp8_sender),
    DecodeBackend("hopper-8bit", _takes_hopper_8bit, _load_hopper_8bit, _load_hopper_8bit_sender),
    DecodeBackend("triton", _takes_triton, _load_triton),
    DecodeBackend("flashinfer", _takes_flashinfer, _load_flashinfer),
    DecodeBackend("torch", _takes_torch, _load_torch),
)


def select_decode(q: Tensor, kv_cache: Tensor, kv_lora_rank: int, dtype: torch.dtype) -> DecodeBackend:
    """The first backend that takes the inputs and gives an output of `dtype`.

    Raises:
        ValueError: none does.
    """
    for backend in DECODE_BACKENDS:
        if backend.takes(q, kv_cache, kv_lora_rank, dtype):
            return backend
    raise ValueError(f"q is on device {q.device}; decode kernels exist for 'cpu', 'cuda'")
