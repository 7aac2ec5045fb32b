"""Queries and caches as Hopper's decode kernels take them: matrices for TMA, or pointers to rows."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dcpmla.attention.backends.calls import DecodeCall
from dcpmla.attention.hopper.schedule import HALF, KEYS, LATENT, ROPE, ROWS
from dcpmla.attention.hopper.stage_ring import describe
from dcpmla.cache.shared_format import data_bytes


class QueryTiles(NamedTuple):
    """Descriptors of both parts of queries (None for the rope part of shared keys), and `Queries.token_stride`."""

    latent: Any
    rope: Any
    token_stride: int | None


class CacheRows(NamedTuple):
    """The cache of a call: descriptors for TMA, or its rows for other producers; the others are None.

    Attributes:
        latent, rope: Descriptors of both parts of keys.
        rows: Rows, as words of four bytes if they are converted.
        rows_per_block: Stride of blocks, in rows.
        row_stride, page_stride: Strides of `rows` and of pages of shared keys in fp8_ds_mla, in its elements.
        is_converted: Whether rows of 8 bits are converted to the dtype of queries.
    """

    latent: Any
    rope: Any
    rows: Tensor | None
    rows_per_block: int
    row_stride: int | None
    page_stride: int | None
    is_converted: bool


def describe_queries(call: DecodeCall) -> QueryTiles:
    """Return the queries of a call."""
    q, q_pe, num_heads = call.q, call.q_pe, call.q.shape[1]
    token_stride = None
    if call.has_one_token_each and q.stride(0) != num_heads * q.stride(1):  # `flatten` would copy
        token_stride = q.stride(0)
        columns = (q.shape[0] - 1) * token_stride + q.shape[2]
        latent = describe(q.as_strided((num_heads, columns), (q.stride(1), 1)), ROWS.value, HALF.value)
    else:
        latent = describe(q.flatten(0, 1), ROWS.value, HALF.value)
    rope = None if q_pe is None else describe(q_pe.flatten(0, 1), ROWS.value, ROPE.value)
    return QueryTiles(latent, rope, token_stride)


def describe_cache(call: DecodeCall) -> CacheRows:
    """Return the cache of a call."""
    kv_cache = call.kv_cache
    is_sparse, is_converted = call.block_size == 1, kv_cache.dtype != call.q.dtype
    stored = kv_cache.flatten(1) if is_sparse else kv_cache
    row_stride = stored.stride(-2)
    rows_per_block = kv_cache.stride(0) // row_stride
    if is_converted:
        rows, page_stride = stored.view(torch.int32), None
        row_stride = rows.stride(-2)
        if call.is_planar:
            page_stride, row_stride = row_stride, data_bytes(call.kv_lora_rank) // 4
        return CacheRows(None, None, rows, rows_per_block, row_stride, page_stride, True)
    if is_sparse:
        return CacheRows(None, None, stored, rows_per_block, row_stride, None, False)
    num_rows = (kv_cache.shape[0] - 1) * rows_per_block + kv_cache.shape[1]
    matrix = kv_cache.as_strided((num_rows, kv_cache.shape[2]), (row_stride, 1))
    latent = describe(matrix[:, : LATENT.value], KEYS.value, HALF.value)
    rope = describe(matrix[:, LATENT.value :], KEYS.value, ROPE.value)
    return CacheRows(latent, rope, None, rows_per_block, None, None, False)
