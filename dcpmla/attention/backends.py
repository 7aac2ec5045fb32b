"""Attention kernels by capability: two tables; the first backend in a table that supports a call runs it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Generic, TypeVar

import torch
from torch import Tensor

from dcpmla.attention import flashinfer, reference
from dcpmla.attention.calls import DecodeCall, PrefillCall
from dcpmla.cache.formats import FP8, is_quantized
from dcpmla.comm.exchange import Mailbox
from dcpmla.config import DCPConfig

Call = TypeVar("Call", DecodeCall, PrefillCall)
_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Backend(Generic[Call]):
    """A kernel of one phase, and the calls that it supports.

    Attributes:
        obstacle: Reason why it does not support a call, or ""; depends on device, dtypes, sizes and strides alone.
        run: Function that computes (out, lse); it imports the modules that only this kernel needs.
        sends_rows: Whether `run` of decode also takes a `Mailbox`: it then stores each finished row at the rank that
            owns its head, and returns the merged rows of all ranks.
        joins_keys: Whether `run` of prefill copies k_nope and k_pe into one tensor (`join_keys`).
        needs_gpu: Whether it supports no calls on a CPU.
    """

    name: str
    obstacle: Callable[[Call], str]
    run: Callable[..., tuple[Tensor, Tensor]]
    sends_rows: bool = False
    joins_keys: bool = False
    needs_gpu: bool = False

    def takes(self, call: Call) -> bool:
        """Return whether the backend can run the call."""
        return not self.obstacle(call)


def select_backend(table: list[Backend[Call]], call: Call) -> Backend[Call]:
    """Return the first backend of a table that supports the call, or the backend that the call names.

    Raises:
        ValueError: No backend has that name, the named one does not support the call, or none does.
    """
    if call.backend != "auto":
        backend = find_backend(table, call.backend)
        if obstacle := backend.obstacle(call):
            raise ValueError(f"backend is {call.backend!r}, which does not take this call: {obstacle}; choose 'auto'")
        return backend
    for backend in table:
        if backend.takes(call):
            return backend
    raise ValueError("; ".join(f"{name}: {obstacle}" for name, obstacle in passed_over(table, call).items()))


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
    """Return, by name, why the backends before the chosen one do not support the call; all backends if none does."""
    obstacles = {}
    for backend in table:
        obstacle = backend.obstacle(call)
        if not obstacle:
            break
        obstacles[backend.name] = obstacle
    return obstacles


def register_backend(table: list[Backend[Call]], backend: Backend[Call]) -> None:
    """Insert a custom backend first in a table: DECODE_BACKENDS or PREFILL_BACKENDS.

    Raises:
        ValueError: The table has a backend of that name.
    """
    if backend.name in ("auto", *(each.name for each in table)):
        raise ValueError(f"backend.name is {backend.name!r}; the table has one of that name already")
    table.insert(0, backend)


# ---- decode


def _hopper_obstacle(call: DecodeCall) -> str:
    q, kv_cache, rank = call.q, call.kv_cache, call.kv_lora_rank
    if obstacle := _triton_obstacle(call) or _hopper_gpu_obstacle(q):
        return obstacle
    if rank != 512 or call.rope_dim not in (0, 64):
        return f"latents have {rank} + {call.rope_dim} columns, not 512 + 64 or, of shared keys, 512"
    is_sparse, is_fp8 = call.block_size == 1, q.dtype == FP8
    if is_fp8 and kv_cache.dtype != FP8:
        return f"e4m3 queries go with an e4m3 cache, not {kv_cache.dtype}"
    if is_fp8 and is_sparse:
        return "e4m3 queries go with blocks of 64 n tokens, not pages of one"
    if not is_sparse and call.keys_are_shared:
        return f"shared keys are addressed row by row, not in blocks of {call.block_size}"
    if not is_sparse and not _is_tiled(kv_cache):
        return f"blocks have {kv_cache.shape[1]} tokens, not 64 n, or are no matrix that TMA takes"
    parts = [part for part in (q, call.q_pe) if part is not None]
    rows_are_aligned = _are_aligned(kv_cache, kv_cache.stride(0 if is_sparse else 1))
    if not (rows_are_aligned and all(_are_aligned(part, *part.stride()[:2]) for part in parts)):
        return "rows of queries or of the cache do not begin at multiples of 16 bytes"
    return ""


def _are_aligned(rows: Tensor, *strides: int) -> bool:
    """Return whether all rows with these strides begin at multiples of 16 bytes, in ascending order."""
    size = rows.element_size()
    return rows.data_ptr() % 16 == 0 and all(stride > 0 and stride * size % 16 == 0 for stride in strides)


def _is_tiled(kv_cache: Tensor) -> bool:
    """Return whether blocks are whole tiles of 64 keys, and the cache is one matrix of rows, as TMA requires."""
    rows_per_block, rest = divmod(kv_cache.stride(0), kv_cache.stride(1)) if kv_cache.stride(1) else (0, 0)
    return kv_cache.shape[1] % 64 == rest == 0 and 0 < kv_cache.shape[0] * rows_per_block < 2**31


def _run_hopper(call: DecodeCall, mailbox: Mailbox | None = None) -> tuple[Tensor, Tensor]:
    from dcpmla.attention.hopper.decode import run

    return run(call, mailbox)


def _triton_obstacle(call: DecodeCall) -> str:
    q, kv_cache, dtype = call.q, call.kv_cache, call.out_dtype
    if not q.is_cuda:
        return f"q is on device {q.device}, not a GPU"
    is_quantized_call = is_quantized(kv_cache.dtype)
    if obstacle := _capability_obstacle(q, (8, 9) if is_quantized_call else (8, 0)):
        return obstacle
    if dtype not in _HALF:
        return f"the output has dtype {dtype}, not bfloat16 or float16"
    if q.dtype not in (dtype, FP8) or kv_cache.dtype not in (q.dtype, FP8, torch.uint8):
        return f"q has dtype {q.dtype} and the cache {kv_cache.dtype}, which it does not multiply"
    widths = call.kv_lora_rank, call.rope_dim
    if not all(16 <= width <= 512 and width & (width - 1) == 0 for width in widths if width):
        return f"latents have {widths[0]} + {widths[1]} columns, not powers of 2 from 16 to 512"
    if any(rows is not None and rows.stride(-1) != 1 for rows in (q, call.q_pe, kv_cache)):
        return "rows of queries or of the cache are not contiguous"
    if call.is_planar:
        if kv_cache.stride(1) != kv_cache.shape[2] or kv_cache.stride(0) % 2 or kv_cache.data_ptr() % 2:
            return "pages of the fp8_ds_mla cache are not contiguous, or do not begin at multiples of 2 bytes"
        return ""
    is_words = kv_cache.dtype == torch.uint8  # rows have float32 and bfloat16 parts
    if is_words and (any(stride % 4 for stride in kv_cache.stride()[:2]) or kv_cache.data_ptr() % 4):
        return "rows of the fp8_ds_mla cache do not begin at multiples of 4 bytes"
    return ""


def _run_triton(call: DecodeCall) -> tuple[Tensor, Tensor]:
    from dcpmla.attention.triton.decode import run

    return run(call)


def _flashinfer_obstacle(call: DecodeCall) -> str:
    if obstacle := _triton_obstacle(call) or _hopper_gpu_obstacle(call.q) or _missing_flashinfer():
        return obstacle
    if call.q.dtype != call.kv_cache.dtype or call.q.dtype not in _HALF:
        return f"q has dtype {call.q.dtype} and the cache {call.kv_cache.dtype}; both must be bfloat16 or float16"
    widths = call.kv_lora_rank, call.rope_dim
    return "" if widths == flashinfer.WIDTHS else f"latents have {widths[0]} + {widths[1]} columns, not 512 + 64"


# ---- prefill


def _flashinfer_prefill_obstacle(call: PrefillCall) -> str:
    if obstacle := _half_on_gpu_obstacle(call.q, (9, 0)) or _missing_flashinfer():
        return obstacle
    if call.mask is not None:
        return "it takes no mask of selected tokens"
    dims = call.q.shape[-1], call.v.shape[-1]
    return "" if dims in flashinfer.HEAD_DIMS else f"heads are {dims[0]} and {dims[1]} wide, not 192 or 128 and 128"


def _hopper_prefill_obstacle(call: PrefillCall) -> str:
    q, k_nope, k_pe, v = call.q, call.k_nope, call.k_pe, call.v
    if obstacle := _half_on_gpu_obstacle(q, (9, 0)) or _hopper_gpu_obstacle(q):
        return obstacle
    dims = k_nope.shape[-1], k_pe.shape[-1], v.shape[-1]
    if dims != (128, 64, 128):
        return f"heads are {dims[0]} + {dims[1]} and {dims[2]} wide, not 128 + 64 and 128"
    if not all(map(_is_matrix, (q, k_nope, k_pe[:, None], v))):
        return "rows of queries, keys or values do not begin at multiples of 16 bytes, or lie head by head"
    return ""


def _is_matrix(rows: Tensor) -> bool:
    """Return whether rows [N, h, D] are one matrix [N, columns of all heads], as TMA requires."""
    num_columns = (rows.shape[1] - 1) * rows.stride(1) + rows.shape[2]
    starts = rows.data_ptr(), rows.stride(0) * rows.element_size()
    return rows.stride(2) == 1 and num_columns <= rows.stride(0) and not any(start % 16 for start in starts)


def _run_hopper_prefill(call: PrefillCall) -> tuple[Tensor, Tensor]:
    from dcpmla.attention.hopper.prefill import run

    return run(call)


def _triton_prefill_obstacle(call: PrefillCall) -> str:
    if obstacle := _half_on_gpu_obstacle(call.q, (8, 0)):
        return obstacle
    widths = call.k_pe.shape[-1], max(call.q.shape[-1], call.v.shape[-1])
    return "" if widths[0] > 0 and widths[1] <= 256 else f"heads are {widths[1]} wide with {widths[0]} of RoPE, not 256"


def _run_triton_prefill(call: PrefillCall) -> tuple[Tensor, Tensor]:
    from dcpmla.attention.triton.prefill import run

    return run(call)


# ---- both


def _device_obstacle(call: DecodeCall | PrefillCall) -> str:
    return "" if call.q.device.type in ("cpu", "cuda") else f"q is on device {call.q.device}, not 'cpu' or 'cuda'"


def _half_on_gpu_obstacle(q: Tensor, capability: tuple[int, int]) -> str:
    if not q.is_cuda or q.dtype not in _HALF or torch.version.cuda is None:
        return f"q is {q.dtype} on device {q.device}, not bfloat16 or float16 on a GPU of NVIDIA's"
    return _capability_obstacle(q, capability)


def _capability_obstacle(q: Tensor, needed: tuple[int, int]) -> str:
    found = torch.cuda.get_device_capability(q.device)
    return "" if found >= needed else f"the GPU has compute capability {found}, less than {needed}"


def _hopper_gpu_obstacle(q: Tensor) -> str:
    """Return why the GPU lacks Hopper's instructions, "" if it has them; ROCm uses the same capability numbers."""
    found = torch.cuda.get_device_capability(q.device)
    is_hopper = found[0] == 9 and torch.version.cuda is not None
    return "" if is_hopper else f"the GPU is no Hopper of NVIDIA's (compute capability {found})"


@cache
def _missing_flashinfer() -> str:
    return "" if find_spec("flashinfer") is not None else "the package flashinfer is not installed"


# Best first. Triton exists on Linux only, so kernels are imported when they run.
DECODE_BACKENDS: list[Backend[DecodeCall]] = [
    Backend("hopper", _hopper_obstacle, _run_hopper, sends_rows=True, needs_gpu=True),
    Backend("triton", _triton_obstacle, _run_triton, needs_gpu=True),
    Backend("flashinfer", _flashinfer_obstacle, flashinfer.run_decode, needs_gpu=True),
    Backend("torch", _device_obstacle, reference.mla_decode),
]
# Best first, by `bench prefill`. cuDNN is missing because torch up to 2.13 plans each ragged call anew, in 45 ms.
PREFILL_BACKENDS: list[Backend[PrefillCall]] = [
    Backend("hopper", _hopper_prefill_obstacle, _run_hopper_prefill, needs_gpu=True),
    Backend("flashinfer", _flashinfer_prefill_obstacle, flashinfer.run_prefill, joins_keys=True, needs_gpu=True),
    Backend("triton", _triton_prefill_obstacle, _run_triton_prefill, needs_gpu=True),
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
