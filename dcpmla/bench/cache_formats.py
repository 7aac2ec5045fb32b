"""Cache formats as benchmarks measure them: their names, and caches full of random latents.

"bf16" means rows that are not quantized, in the run's dtype: bfloat16 on GPUs, float32 on CPUs.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dcpmla.cache import formats

# Largest values are 448 times these, well above normal ones. They differ, so that a kernel that mixes them up is found.
KV_SCALE, Q_SCALE = 0.04, 0.02
_CHUNK = 1 << 15  # rows quantized at a time: their wide copies stay below 1 GB


def config_name(cache_format: str) -> str:
    """Return the `DCPConfig.kv_cache_dtype` of a format."""
    return "auto" if cache_format == "bf16" else cache_format


def storage_dtype(cache_format: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a cache tensor whose plain rows would be in `dtype`."""
    return formats.storage_dtype(config_name(cache_format), dtype)


def query_dtypes(cache_format: str, asked: Sequence[str]) -> Sequence[str]:
    """Return the query dtypes to measure with a format: the ones asked for with fp8, which alone allows e4m3."""
    return asked if cache_format == "fp8" else ("auto",)


def scale_tensor(scale: float, device: torch.device) -> Tensor:
    """Return a scale [1] float32."""
    return torch.tensor([scale], dtype=torch.float32, device=device)


def kv_scale_of(storage: torch.dtype, device: torch.device) -> Tensor | None:
    """Return KV_SCALE for a cache that has a scale."""
    return scale_tensor(KV_SCALE, device) if storage == formats.FP8 else None


def fill_randomly(kv_cache: Tensor, kv_lora_rank: int, dtype: torch.dtype) -> None:
    """Fill a contiguous cache [..., row_width] with normal latents of `dtype`, in its format and with KV_SCALE."""
    if kv_cache.dtype == dtype:
        kv_cache.normal_()
        return
    latent_dim = kv_lora_rank + formats.rope_dim_of(kv_cache.shape[-1], kv_cache.dtype, kv_lora_rank)
    kv_scale = kv_scale_of(kv_cache.dtype, kv_cache.device)
    for rows in kv_cache.flatten(0, -2).split(_CHUNK):
        latents = torch.randn(len(rows), latent_dim, dtype=dtype, device=rows.device)
        rows.copy_(formats.to_cache_rows(latents[:, :kv_lora_rank], latents[:, kv_lora_rank:], rows.dtype, kv_scale))


def fill_slots(
    cache: Tensor, head_dim: int, dtype: torch.dtype, write: Callable[[Tensor, Tensor, Tensor], object]
) -> None:
    """Fill a cache of shared keys or index keys with normal rows of `dtype`, in its format.

    Args:
        write: Function that writes rows into slots of the cache: `write_rows` or `write_index_keys` of dcpmla.cache.
    """
    if cache.dtype == dtype:
        cache.normal_()
        return
    for slots in torch.arange(cache.shape[0] * cache.shape[1], device=cache.device).split(_CHUNK):
        write(cache, torch.randn(len(slots), head_dim, dtype=dtype, device=cache.device), slots)
