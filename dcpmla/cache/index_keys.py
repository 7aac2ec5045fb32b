"""The index cache of a layer on one rank: a key for each token that the rank owns, in the same slots as its latents.

The dtype of an index cache determines its format, as for latents (`cache/formats.py`):

- the model's own: keys [D] unchanged; [num_blocks, block_size, D].
- torch.uint8 (`fp8`): a block holds the keys of all its tokens as e4m3, then a float32 scale for each, a power of two:
  D + 4 bytes a token, 132 with DeepSeek's widths; [num_blocks, block_size, D + 4]. Source: DeepSeek-V3.2's index cache
  as vLLM lays it out.
"""

import torch
from torch import Tensor

from dcpmla.cache.formats import FP8, format_name, planes
from dcpmla.cache.rows import TokenRows
from dcpmla.parallel import quantized

SCALE_BYTES = 4
NORM_EPS = 1e-6  # eps of the keys' LayerNorm
SMALLEST_AMAX = quantized.SMALLEST_AMAX  # gives a key of zeros a scale, too


def index_storage_dtype(index_cache_dtype: str, dtype: torch.dtype) -> torch.dtype:
    """Return an index cache's dtype for a `DCPConfig.index_cache_dtype` and a model that computes in `dtype`."""
    return torch.uint8 if index_cache_dtype == "fp8" else dtype


def index_format_name(storage: torch.dtype) -> str:
    """Name the format of an index cache's dtype (`format_name`)."""
    return "fp8" if storage == torch.uint8 else format_name(storage)


def index_row_width(storage: torch.dtype, head_dim: int) -> int:
    """Return the number of elements that an index cache holds for a token."""
    return head_dim + SCALE_BYTES if storage == torch.uint8 else head_dim


def check_index_cache(index_cache: Tensor, storage: torch.dtype, head_dim: int) -> None:
    """Raise ValueError unless index_cache holds keys [head_dim] in that dtype's format, in contiguous blocks."""
    width = index_row_width(storage, head_dim)
    if index_cache.dtype != storage or index_cache.stride()[1:] != (width, 1) or index_cache.shape[2] != width:
        raise ValueError(
            f"index_cache (--index-cache-dtype) is {index_cache.dtype} {tuple(index_cache.shape)} with strides "
            f"{index_cache.stride()}; keys of {head_dim} take {storage} [num_blocks, block_size, {width}], in "
            "contiguous blocks"
        )


def index_to_fp8(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize [..., D] to e4m3 [..., D] and float32 scales [...], each the smallest power of two without saturation.

    Source: the ue8m0 scales of DeepSeek-V3.2's indexer, 2^ceil(log2(amax / 448)).
    """
    codes, scales = quantized.quantize_groups(values.reshape(-1, values.shape[-1]), values.shape[-1], ue8m0=True)
    return codes.view(values.shape), scales.view(values.shape[:-1])


def write_index_keys(index_cache: Tensor, keys: Tensor, slots: Tensor) -> None:
    """Store keys [N, D] at slots [N] int64; rows with slot -1 are skipped."""
    mine = slots >= 0
    slots, keys = slots[mine], keys[mine]
    block, offset = slots // index_cache.shape[1], slots % index_cache.shape[1]
    if index_cache.dtype != torch.uint8:
        index_cache[block, offset] = keys.to(index_cache.dtype)
        return
    codes, scales = index_to_fp8(keys)
    code_plane, scale_plane = _planes_of(index_cache)
    code_plane[block, offset] = codes.view(torch.uint8)
    scale_plane[block, offset] = scales[:, None].view(torch.uint8)


def read_index_keys(index_cache: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    """Read whole blocks [...] int64.

    Returns:
        Keys [..., block_size, D] and, of an fp8 cache, their scales [..., block_size] float32.
    """
    if index_cache.dtype != torch.uint8:
        return index_cache[blocks], None
    code_plane, scale_plane = _planes_of(index_cache)
    return code_plane[blocks].view(FP8), scale_plane[blocks].view(torch.float32)[..., 0]


def index_rows(index_cache: Tensor | None, span: int) -> list[TokenRows]:
    """Return the rows of an index cache, keys of `span` positions each; nothing for None."""
    if index_cache is None:
        return []
    if index_cache.dtype != torch.uint8:
        return [TokenRows.of("index keys", index_cache, span)]
    code_plane, scale_plane = _planes_of(index_cache)
    return [TokenRows.of("index keys", code_plane, span), TokenRows.of("scales of index keys", scale_plane, span)]


def _planes_of(index_cache: Tensor) -> tuple[Tensor, Tensor]:
    _, block_size, width = index_cache.shape
    return planes(index_cache, block_size, width - SCALE_BYTES, SCALE_BYTES)
