"""Checks of a decode call: ValueErrors that name the argument, its value, and the expected one."""

import torch
from torch import Tensor

from dcpmla.cache import formats, shared_format

Queries = Tensor | tuple[Tensor, Tensor]  # [T, H, L + R], or their parts [T, H, L] and [T, H, R]
_Q_FP8 = "e4m3 queries, and they alone, go with an fp8 cache, q_scale and the output's dtype"


def split_queries(q: Queries, kv_lora_rank: int) -> tuple[Tensor, Tensor | None]:
    """Return the two parts of queries, as views where they are joined."""
    if isinstance(q, Tensor):
        if q.ndim != 3 or not 0 < kv_lora_rank <= q.shape[-1]:
            raise ValueError(
                f"q has shape {tuple(q.shape)}; expected [T, H, kv_lora_rank + rope] with kv_lora_rank {kv_lora_rank}"
            )
        return q[..., :kv_lora_rank], q[..., kv_lora_rank:] if q.shape[-1] > kv_lora_rank else None
    latent, rope = q
    is_split = latent.ndim == rope.ndim == 3 and latent.shape[:2] == rope.shape[:2] and rope.shape[-1] > 0
    if not is_split or not 0 < kv_lora_rank == latent.shape[-1]:
        raise ValueError(
            f"q has parts of shapes {tuple(latent.shape)} and {tuple(rope.shape)}; expected [T, H, kv_lora_rank] and "
            f"[T, H, rope] with kv_lora_rank {kv_lora_rank}"
        )
    if (latent.dtype, latent.device) != (rope.dtype, rope.device):
        raise ValueError(
            f"q has parts of {latent.dtype} on {latent.device} and {rope.dtype} on {rope.device}; they must be alike"
        )
    return latent, rope


def check_cache(kv_cache: Tensor, kv_lora_rank: int, rope_dim: int) -> None:
    """Raise ValueError for a cache whose shape does not match the queries' widths; rope_dim is 0 for shared keys."""
    if rope_dim == 0 and kv_cache.dtype == torch.uint8:
        _, *page = shared_format.rows_shape(0, kv_lora_rank, kv_cache.dtype)
        if kv_cache.ndim != 3 or [*kv_cache.shape[1:]] != page:
            raise ValueError(
                f"kv_cache has shape {tuple(kv_cache.shape)}; expected [num_pages, {page[0]}, {page[1]}] for "
                f"fp8_ds_mla rows of {kv_lora_rank} shared keys"
            )
        return
    width = formats.row_width(kv_cache.dtype, kv_lora_rank, rope_dim)
    if kv_cache.ndim != 3 or kv_cache.shape[-1] != width:
        raise ValueError(
            f"kv_cache has shape {tuple(kv_cache.shape)}; expected [num_blocks, block_size, {width}] to match q"
        )


def check_requests(
    q: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    request_index: Tensor | None,
    query_start_loc: Tensor | None,
) -> int:
    """Return the number of requests.

    Raises:
        ValueError: Shapes, dtypes or strides do not match the queries' tokens.
    """
    num_tokens = q.shape[0]
    if block_table.ndim != 2 or ((block_table.shape[0] == 0 or num_tokens == 0) and block_table.shape[0] != num_tokens):
        raise ValueError(
            f"block_table has shape {tuple(block_table.shape)}; expected [num_reqs, max_blocks], a row for each request"
        )
    if request_index is not None and (request_index.ndim != 1 or len(block_table) == 0 < len(request_index)):
        raise ValueError(
            f"request_index has shape {tuple(request_index.shape)}; expected [num_reqs], a row of block_table "
            f"{tuple(block_table.shape)} for each"
        )
    num_reqs = len(block_table if request_index is None else request_index)
    if tuple(seq_lens.shape) != (num_tokens,):
        raise ValueError(
            f"seq_lens has shape {tuple(seq_lens.shape)}; expected [{num_tokens}], one for each query token"
        )
    if query_start_loc is not None and tuple(query_start_loc.shape) != (num_reqs + 1,):
        raise ValueError(
            f"query_start_loc has shape {tuple(query_start_loc.shape)}; expected [{num_reqs + 1}], num_reqs + 1"
        )
    all_numbers = {"block_table": block_table, "seq_lens": seq_lens, "request_index": request_index}
    for name, numbers in (all_numbers | {"query_start_loc": query_start_loc}).items():
        if numbers is not None and (numbers.dtype != torch.int32 or numbers.stride(-1) != 1):
            raise ValueError(
                f"{name} has dtype {numbers.dtype} and strides {numbers.stride()}; expected int32 with contiguous rows"
            )
    return num_reqs


def check_dtypes(
    q: Tensor, kv_cache: Tensor, kv_scale: Tensor | None, q_scale: Tensor | None, dtype: torch.dtype | None
) -> None:
    """Raise ValueError for dtypes and scales that do not match; dtype is the output's, or None for q's."""
    formats.check_kv_scale(kv_cache.dtype, kv_scale)
    state = "missing" if q_scale is None else "given"
    found = f"q has dtype {q.dtype}, kv_cache {kv_cache.dtype}, q_scale is {state} and dtype is {dtype}"
    if q.dtype != formats.FP8:
        if not q.dtype.is_floating_point or q.element_size() < 2:
            raise ValueError(f"q has dtype {q.dtype}; it must be a float dtype of 16 bits or more, or e4m3")
        if not formats.is_quantized(kv_cache.dtype) and kv_cache.dtype != q.dtype:
            raise ValueError(f"kv_cache has dtype {kv_cache.dtype}; expected q's, {q.dtype}, or one of 8 bits")
        if q_scale is not None or dtype not in (None, q.dtype):
            raise ValueError(f"{found}; {_Q_FP8}")
        return
    if kv_cache.dtype != formats.FP8 or q_scale is None or dtype is None:
        raise ValueError(f"{found}; {_Q_FP8}")
    if q_scale.dtype != torch.float32 or q_scale.numel() != 1:
        raise ValueError(f"q_scale is {q_scale.dtype} {tuple(q_scale.shape)}; expected torch.float32 of one element")
