"""Triton kernels of the hashes of n-grams; `dcpmla.model.ngrams` is the reference."""

import triton
import triton.language as tl
from torch import Tensor

from dcpmla.model.buckets import Buckets
from dcpmla.model.token_slots import TokenSlots

_TOKENS = 64  # tokens of a program


@triton.jit
def _slot(position, request, table_ptr, table_stride, block_tokens, is_known):
    """Return the slots of positions in the cached ids."""
    column = position // block_tokens
    block = tl.load(table_ptr + request.to(tl.int64) * table_stride + column, mask=is_known, other=0)
    return block.to(tl.int64) * block_tokens + position % block_tokens


@triton.jit(do_not_specialize=["num_tokens"])
def store_ids_kernel(
    cached_ids_ptr,
    token_ids_ptr,
    token_map_ptr,
    request_ptr,
    seq_lens_ptr,
    table_ptr,
    table_stride,
    block_tokens,
    num_tokens,
    TOKENS: tl.constexpr,
):
    """Write the ids of some tokens."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    position = tl.load(seq_lens_ptr + token, mask=token < num_tokens, other=0) - 1
    is_real = position >= 0
    request = tl.load(request_ptr + token, mask=is_real, other=0)
    slot = _slot(position, request, table_ptr, table_stride, block_tokens, is_real)
    compressed = tl.load(token_map_ptr + tl.load(token_ids_ptr + token, mask=is_real, other=0), mask=is_real, other=0)
    tl.store(cached_ids_ptr + slot, compressed, mask=is_real)


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "pad_id"])
def hash_ngrams_kernel(
    hashes_ptr,
    cached_ids_ptr,
    request_ptr,
    seq_lens_ptr,
    table_ptr,
    table_stride,
    block_tokens,
    multipliers_ptr,
    orders_ptr,
    primes_ptr,
    starts_ptr,
    pad_id,
    num_tokens,
    num_rows,
    DISTANCES: tl.constexpr,
    COLUMNS: tl.constexpr,
    COLUMNS_P: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Hash some tokens for one layer.

    num_rows: Rows of each layer's hashes.
    COLUMNS_P: Power of two, at least COLUMNS.
    """
    layer = tl.program_id(1)
    token, column = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, COLUMNS_P)
    is_token, is_column = token < num_tokens, column < COLUMNS
    last = tl.load(seq_lens_ptr + token, mask=is_token, other=0) - 1
    request = tl.load(request_ptr + token, mask=is_token, other=0)
    order = tl.load(orders_ptr + column, mask=is_column, other=0)
    mixed, chosen = tl.zeros([TOKENS], tl.int64), tl.zeros([TOKENS, COLUMNS_P], tl.int64)
    for distance in tl.static_range(DISTANCES):
        is_known = last >= distance
        slot = _slot(last - distance, request, table_ptr, table_stride, block_tokens, is_known)
        compressed = tl.load(cached_ids_ptr + slot, mask=is_known, other=0).to(tl.int64)
        compressed = tl.where(is_known, compressed, pad_id)
        mixed ^= compressed * tl.load(multipliers_ptr + layer * DISTANCES + distance)
        chosen = tl.where((order == distance + 1)[None, :], mixed[:, None], chosen)
    prime = tl.load(primes_ptr + layer * COLUMNS + column, mask=is_column, other=1)
    start = tl.load(starts_ptr + layer * COLUMNS + column, mask=is_column, other=0)
    row = chosen % prime[None, :] + start[None, :]
    at = (layer * num_rows.to(tl.int64) + token)[:, None] * COLUMNS + column[None, :]
    tl.store(hashes_ptr + at, row.to(tl.int32), mask=is_token[:, None] & is_column[None, :])


def store_ids(cached_ids: Tensor, token_ids: Tensor, token_map: Tensor, rows: TokenSlots) -> None:
    """Compute `model.ngrams.store_ids` in one kernel."""
    num_tokens, table = len(rows.seq_lens), rows.block_table
    if num_tokens:
        sizes = table.stride(0), cached_ids.shape[1], num_tokens
        columns = rows.request, rows.seq_lens, table
        store_ids_kernel[(triton.cdiv(num_tokens, _TOKENS),)](
            cached_ids, token_ids, token_map, *columns, *sizes, TOKENS=_TOKENS
        )


def hash_ngrams(hashes: Tensor, cached_ids: Tensor, rows: TokenSlots, buckets: Buckets, pad_id: int) -> None:
    """Compute `model.ngrams.hash_ngrams` in one kernel."""
    num_layers, num_rows, num_columns = hashes.shape
    num_tokens = len(rows.seq_lens)
    if num_tokens:
        hash_ngrams_kernel[(triton.cdiv(num_tokens, _TOKENS), num_layers)](
            hashes,
            cached_ids,
            *rows,
            rows.block_table.stride(0),
            cached_ids.shape[1],
            *buckets,
            pad_id,
            num_tokens,
            num_rows,
            DISTANCES=buckets.multipliers.shape[1],
            COLUMNS=num_columns,
            COLUMNS_P=triton.next_power_of_2(num_columns),
            TOKENS=_TOKENS,
        )
