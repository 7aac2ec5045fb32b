"""The calls that each kernel of attention supports: functions that return why it does not support a call, or "".

Answers depend on device, dtypes, sizes and strides alone. Only plain torch takes calls on a CPU (`Backend.needs_gpu`).
"""

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from dcpmla.attention.backends import flashinfer
from dcpmla.attention.backends.calls import DecodeCall, PrefillCall
from dcpmla.cache.formats import FP8, is_quantized

_HALF = (torch.bfloat16, torch.float16)
_WIDE_BYTES = 166_912  # shared memory of 16 rows with latents of 1,024 columns, in fp8_ds_mla's format


def hopper_decode(call: DecodeCall) -> str:
    q, kv_cache, rank = call.q, call.kv_cache, call.kv_lora_rank
    if obstacle := triton_decode(call) or _hopper_gpu_obstacle(q):
        return obstacle
    if rank != 512 or call.rope_dim not in (0, 64):
        return f"latents have {rank} + {call.rope_dim} columns, not 512 + 64 or, of shared keys, 512"
    is_sparse, is_fp8 = call.block_size == 1, q.dtype == FP8
    if is_fp8 and kv_cache.dtype != FP8:
        return f"e4m3 queries go with an e4m3 cache, not {kv_cache.dtype}"
    if call.num_tile_lanes is not None and is_sparse:
        return "single rows have no tiles of positions, which a fixed order sums up"
    if is_fp8 and is_sparse:
        return "e4m3 queries need blocks of a multiple of 64 tokens, not a table of single rows"
    if not is_sparse and call.keys_are_shared:
        return f"shared keys are addressed row by row, not in blocks of {call.block_size}"
    if not is_sparse and not _is_tiled(kv_cache):
        return f"blocks have {kv_cache.shape[1]} tokens, not a multiple of 64, or are no matrix that TMA takes"
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
    rows_per_block, remainder = divmod(kv_cache.stride(0), kv_cache.stride(1)) if kv_cache.stride(1) else (0, 0)
    return kv_cache.shape[1] % 64 == remainder == 0 and 0 < kv_cache.shape[0] * rows_per_block < 2**31


def triton_decode(call: DecodeCall) -> str:
    q, kv_cache, dtype = call.q, call.kv_cache, call.dtype or call.q.dtype
    is_quantized_call = is_quantized(kv_cache.dtype)
    if obstacle := _capability_obstacle(q, (8, 9) if is_quantized_call else (8, 0)):
        return obstacle
    if dtype not in _HALF:
        return f"the output has dtype {dtype}, not bfloat16 or float16"
    if q.dtype not in (dtype, FP8) or kv_cache.dtype not in (q.dtype, FP8, torch.uint8):
        return f"q has dtype {q.dtype} and the cache {kv_cache.dtype}, which it does not multiply"
    widths = call.kv_lora_rank, call.rope_dim
    if not all(16 <= width <= 1024 and width & (width - 1) == 0 for width in widths if width):
        return f"latents have {widths[0]} + {widths[1]} columns, not powers of 2 from 16 to 1,024"
    if max(widths) > 512:
        properties: Any = torch.cuda.get_device_properties(q.device)
        if properties.shared_memory_per_block_optin < _WIDE_BYTES:
            return f"latents have {widths[0]} columns, and the GPU less than {_WIDE_BYTES:,} bytes of shared memory"
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


def flashinfer_prefill(call: PrefillCall) -> str:
    if obstacle := _half_on_gpu_obstacle(call.q, (9, 0)) or _missing_flashinfer():
        return obstacle
    if call.mask is not None:
        return "it takes no mask of selected tokens"
    dims = call.q.shape[-1], call.v.shape[-1]
    return "" if dims in flashinfer.HEAD_DIMS else f"heads are {dims[0]} and {dims[1]} wide, not 192 or 128 and 128"


def hopper_prefill(call: PrefillCall) -> str:
    q, k_nope, k_pe, v = call.q, call.k_nope, call.k_pe, call.v
    if obstacle := hopper_widths(q, k_nope, k_pe, v):
        return obstacle
    if not all(map(is_matrix, (q, k_nope, k_pe[:, None], v))):
        return "rows of queries, keys or values do not begin at multiples of 16 bytes, or are stored head by head"
    return ""


def hopper_widths(q: Tensor, k_nope: Tensor, k_pe: Tensor, v: Tensor) -> str:
    """Return why this GPU or the widths of heads rule out Hopper's kernels of prefill; "" if nothing does."""
    if obstacle := _half_on_gpu_obstacle(q, (9, 0)) or _hopper_gpu_obstacle(q):
        return obstacle
    dims = k_nope.shape[-1], k_pe.shape[-1], v.shape[-1]
    return "" if dims == (128, 64, 128) else f"heads are {dims[0]} + {dims[1]} and {dims[2]} wide, not 128 + 64 and 128"


def is_matrix(rows: Tensor) -> bool:
    """Return whether rows [N, h, D] are one matrix [N, columns of all heads], as TMA requires."""
    num_columns = (rows.shape[1] - 1) * rows.stride(1) + rows.shape[2]
    starts = rows.data_ptr(), rows.stride(0) * rows.element_size()
    return rows.stride(2) == 1 and num_columns <= rows.stride(0) and not any(start % 16 for start in starts)


def triton_prefill(call: PrefillCall) -> str:
    if obstacle := _half_on_gpu_obstacle(call.q, (8, 0)):
        return obstacle
    width = max(call.q.shape[-1], call.v.shape[-1])
    return "" if width <= 256 else f"heads are {width} wide, not up to 256"


def _half_on_gpu_obstacle(q: Tensor, capability: tuple[int, int]) -> str:
    if q.dtype not in _HALF or torch.version.cuda is None:
        return f"q is {q.dtype} on device {q.device}, not bfloat16 or float16 on a GPU of NVIDIA's"
    return _capability_obstacle(q, capability)


def _capability_obstacle(q: Tensor, needed: tuple[int, int]) -> str:
    capability = torch.cuda.get_device_capability(q.device)
    return "" if capability >= needed else f"the GPU has compute capability {capability}, less than {needed}"


def _hopper_gpu_obstacle(q: Tensor) -> str:
    """Return why the GPU lacks Hopper's instructions, "" if it has them; ROCm uses the same capability numbers."""
    capability = torch.cuda.get_device_capability(q.device)
    is_hopper = capability[0] == 9 and torch.version.cuda is not None
    return "" if is_hopper else f"the GPU is no Hopper of NVIDIA's (compute capability {capability})"


@cache
def _missing_flashinfer() -> str:
    return "" if find_spec("flashinfer") is not None else "the package flashinfer is not installed"
