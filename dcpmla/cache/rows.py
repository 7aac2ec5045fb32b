"""Rows of a layer's latent cache, written and read by slot."""

import torch
from torch import Tensor

from dcpmla.cache.formats import dequantize, quantize, rope_dim_of
from dcpmla.operators import operator


def write_latents(kv_cache: Tensor, kv_c: Tensor, k_pe: Tensor, slots: Tensor, kv_scale: Tensor | None = None) -> None:
    """Store latents in a layer's cache. (On a GPU `finish_latents` stores a layer's own latents.)

    Args:
        kv_cache: Cache [num_blocks, block_size, width] in one of the formats of `dcpmla.cache.formats`.
        kv_c, k_pe: Latents [N, L] after their norm, rope parts [N, R] after RoPE.
        slots: Slots of this rank [N], int64; -1 skips a row.
        kv_scale: Scale of an fp8 cache; None for other formats.
    Raises:
        ValueError: The format cannot hold the values, or takes no such scale.
    """
    mine = slots >= 0
    slots = slots[mine]
    # Indexed by block and offset, because a cache that is a slice of a larger one has no flat view.
    kv_cache[slots // kv_cache.shape[1], slots % kv_cache.shape[1]] = quantize(
        kv_c[mine], k_pe[mine], kv_cache.dtype, kv_scale
    )


@operator(
    "read_latents",
    kernel="dcpmla.cache.kernels:read_latents",
    fake=lambda kv_cache, slots: kv_cache.new_empty(slots.shape[0], kv_cache.shape[-1]),
    runs=lambda kv_cache: kv_cache.is_cuda,
)
def read_latents(kv_cache: Tensor, slots: Tensor) -> Tensor:
    """Return rows [N, width] of a layer's cache at slots [N] int64, in the cache's format. A custom op."""
    return kv_cache[slots // kv_cache.shape[1], slots % kv_cache.shape[1]]


@operator(
    "dequantize_rows",
    kernel="dcpmla.cache.kernels:dequantize_rows",
    fake=lambda rows, kv_lora_rank, dtype: rows.new_empty(
        rows.shape[0], kv_lora_rank + rope_dim_of(rows.shape[1], rows.dtype, kv_lora_rank), dtype=dtype
    ),
    runs=lambda rows, dtype: rows.is_cuda and dtype != torch.float64,
)
def dequantize_rows(rows: Tensor, kv_lora_rank: int, kv_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Dequantize rows [N, width] of an 8-bit cache to latents [N, L + R] (`formats.dequantize`). A custom op."""
    return dequantize(rows, kv_lora_rank, kv_scale, dtype)
