"""Cache formats of a token's latent, byte by byte, in plain torch: the specification of the kernels of a cache.

The dtype of a cache tensor determines its format:

- the model's own (bfloat16, float16, float32): kv_c [L], k_pe [R] unchanged.
- torch.float8_e4m3fn (`fp8`): kv_c and k_pe as e4m3, with one float32 scale for both and for all tokens of a layer,
  kept outside the cache.
- torch.uint8 (`fp8_ds_mla`): kv_c as e4m3, a float32 scale for each 128 of its values, k_pe in bfloat16: 656 bytes
  (512 + 16 + 128) with DeepSeek's widths. Source: FlashMLA's format for DeepSeek-V3.2.
"""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0  # largest number of e4m3
TILE = 128  # values of kv_c that share a scale in fp8_ds_mla
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def storage_dtype(kv_cache_dtype: str, dtype: torch.dtype) -> torch.dtype:
    """Return a cache tensor's dtype for a `DCPConfig.kv_cache_dtype` and a model that computes in `dtype`.

    Raises:
        ValueError: The format is "bf16" and the model computes in another dtype.
    """
    if kv_cache_dtype == "bf16" and dtype != torch.bfloat16:
        raise ValueError(f"kv_cache_dtype (--kv-cache-dtype) is 'bf16', but the model computes in {dtype}; choose auto")
    return {"fp8": FP8, "fp8_ds_mla": torch.uint8}.get(kv_cache_dtype, dtype)


def format_name(storage: torch.dtype) -> str:
    """Name the format of a cache tensor's dtype as in `DCPConfig.kv_cache_dtype`, or by the dtype itself."""
    return {torch.bfloat16: "bf16", FP8: "fp8", torch.uint8: "fp8_ds_mla"}.get(
        storage, str(storage).removeprefix("torch.")
    )


def row_width(storage: torch.dtype, kv_lora_rank: int, rope_dim: int) -> int:
    """Return the number of elements of a cache row.

    Raises:
        ValueError: The format is fp8_ds_mla and the latent's width is no multiple of 128.
    """
    if storage != torch.uint8:
        return kv_lora_rank + rope_dim
    if kv_lora_rank % TILE:
        raise ValueError(
            f"kv_cache_dtype (--kv-cache-dtype) fp8_ds_mla scales {TILE} values of kv_c at a time; kv_lora_rank is "
            f"{kv_lora_rank}"
        )
    return kv_lora_rank + kv_lora_rank // TILE * 4 + rope_dim * 2


def is_quantized(storage: torch.dtype) -> bool:
    """Return whether rows of a cache dtype must be dequantized: true for the 8-bit formats."""
    return storage in (FP8, torch.uint8)


def check_device(storage: torch.dtype, device: torch.device) -> None:
    """Raise ValueError for an 8-bit format on a GPU whose kernels cannot convert e4m3."""
    if is_quantized(storage) and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ValueError(
            f"kv_cache_dtype (--kv-cache-dtype) is {format_name(storage)!r}, which needs GPUs of compute capability "
            "8.9 or higher; choose auto"
        )


def to_cache_rows(kv_c: Tensor, k_pe: Tensor, storage: torch.dtype, kv_scale: Tensor | None) -> Tensor:
    """Turn latents into cache rows [N, row_width], quantized in an 8-bit format.

    Args:
        kv_c: [N, L] after its norm.
        k_pe: [N, R] after RoPE.
        storage: Dtype of the cache.
        kv_scale: Scale of an fp8 cache, float32 of one element; None for other formats.
    Raises:
        ValueError: Values for an 8-bit format are NaN or infinite, which it cannot hold; kv_scale is missing, or the
            format takes none.
    """
    check_kv_scale(storage, kv_scale)
    if not is_quantized(storage):
        return torch.cat([kv_c, k_pe], -1).to(storage)
    for name, values in (("kv_c", kv_c), ("k_pe", k_pe)):
        if not values.isfinite().all():
            raise ValueError(
                f"{name} has values that are not finite; an 8-bit cache (--kv-cache-dtype) cannot hold them"
            )
    if kv_scale is not None:
        return to_fp8(torch.cat([kv_c, k_pe], -1), kv_scale)
    tiles = kv_c.float().unflatten(-1, (-1, TILE))
    scales = (tiles.abs().amax(-1) / FP8_MAX).clamp(min=_SMALLEST_SCALE)
    parts = to_fp8(tiles, scales[..., None]).flatten(-2), scales, k_pe.to(torch.bfloat16)
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)


def to_latents(rows: Tensor, kv_lora_rank: int, kv_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Turn cache rows [..., row_width] into latents [..., L + R] in `dtype`.

    Codes are multiplied by scales in float32 at least, and the products rounded to `dtype` once.

    Args:
        kv_scale: Scale of an fp8 cache, as in `to_cache_rows`.
    """
    check_kv_scale(rows.dtype, kv_scale)
    wide = torch.promote_types(dtype, torch.float32)
    if kv_scale is not None:
        return (rows.to(wide) * kv_scale).to(dtype)
    if rows.dtype != torch.uint8:
        return rows.to(dtype)
    scale_bytes = kv_lora_rank // TILE * 4
    values, scales, k_pe = (
        part.contiguous()
        for part in rows.split([kv_lora_rank, scale_bytes, rows.shape[-1] - kv_lora_rank - scale_bytes], -1)
    )
    tiles = values.view(FP8).to(wide).unflatten(-1, (-1, TILE)) * scales.view(torch.float32)[..., None]
    return torch.cat([tiles.flatten(-2).to(dtype), k_pe.view(torch.bfloat16).to(dtype)], -1)


def write_latents(kv_cache: Tensor, kv_c: Tensor, k_pe: Tensor, slots: Tensor, kv_scale: Tensor | None = None) -> None:
    """Store latents in a layer's cache. (On a GPU the kernel of `norm_rope_cache` does this itself.)

    Args:
        kv_cache: Cache [num_blocks, block_size, width] in one of the formats of `dcpmla.cache.formats`.
        kv_c, k_pe: Latents [N, L] after their norm, rope parts [N, R] after RoPE.
        slots: Slots of this rank [N], int64; -1 skips a row.
        kv_scale: Scale of an fp8 cache; None for other formats.
    Raises:
        ValueError: Same cases as `to_cache_rows`.
    """
    is_own = slots >= 0
    slots = slots[is_own]
    # Indexed by block and offset, because a cache that is a slice of a larger one has no flat view.
    kv_cache[slots // kv_cache.shape[1], slots % kv_cache.shape[1]] = to_cache_rows(
        kv_c[is_own], k_pe[is_own], kv_cache.dtype, kv_scale
    )


def rope_dim_of(row_width: int, storage: torch.dtype, kv_lora_rank: int) -> int:
    """Return R for a cache whose rows have row_width elements."""
    if storage != torch.uint8:
        return row_width - kv_lora_rank
    return (row_width - kv_lora_rank - kv_lora_rank // TILE * 4) // 2


def planes(pages: Tensor, num_rows: int, row_bytes: int, scale_bytes: int) -> tuple[Tensor, Tensor]:
    """Split pages into views of their rows [num_pages, num_rows, row_bytes] and of their scales [num_pages, num_rows,
    scale_bytes]. A page is a block of index keys or of shared keys, in bytes: first all rows, then all scales.
    """
    rows, scales, _ = pages.flatten(1).tensor_split([num_rows * row_bytes, num_rows * (row_bytes + scale_bytes)], 1)
    return rows.unflatten(1, (num_rows, row_bytes)), scales.unflatten(1, (num_rows, scale_bytes))


def to_fp8(values: Tensor, scale: Tensor) -> Tensor:
    """Convert values / scale to e4m3, rounded to nearest, ties to even; larger values saturate."""
    return (values.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def check_cache(kv_cache: Tensor, block_size: int, width: int, kv_cache_dtype: str, storage: torch.dtype) -> None:
    """Raise ValueError for a cache that does not have blocks of block_size rows of `width` elements of `storage`, which
    is the dtype of kv_cache_dtype.
    """
    if kv_cache.ndim != 3 or kv_cache.shape[1:] != (block_size, width):
        raise ValueError(f"kv_cache has shape {tuple(kv_cache.shape)}; expected [num_blocks, {block_size}, {width}]")
    if kv_cache.dtype != storage:
        asked = f"kv_cache_dtype (--kv-cache-dtype) {kv_cache_dtype!r}"
        raise ValueError(f"kv_cache has dtype {kv_cache.dtype}; expected {storage} for {asked}")
    if kv_cache.stride(-1) != 1:
        raise ValueError(f"kv_cache has strides {kv_cache.stride()}; the values of a row must be contiguous")


def check_kv_scale(storage: torch.dtype, kv_scale: Tensor | None) -> None:
    """Raise ValueError for an fp8 cache without a kv_scale, float32 of one element, or another cache with one."""
    if (storage == FP8) != (kv_scale is not None):
        raise ValueError(
            f"kv_scale is {'missing' if kv_scale is None else 'given'} for a cache of {storage}; it belongs to {FP8} "
            "alone"
        )
    check_scale("kv_scale", kv_scale)


def check_scale(name: str, scale: Tensor | None) -> None:
    """Raise ValueError for a scale that is not float32 of one element."""
    if scale is not None and (scale.dtype != torch.float32 or scale.numel() != 1):
        raise ValueError(f"{name} is {scale.dtype} {tuple(scale.shape)}; expected torch.float32 of one element")
