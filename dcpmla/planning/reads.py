"""Bytes of keys in index caches."""

import torch

from dcpmla.cache.index_keys import index_row_width, index_storage_dtype
from dcpmla.config import IndexerConfig


def index_row_bytes(indexer: IndexerConfig, index_cache_dtype: str) -> int:
    """Return the bytes of one key in one layer's index cache (`dcpmla.cache.index_keys`)."""
    storage = index_storage_dtype(index_cache_dtype, torch.bfloat16)
    return index_row_width(storage, indexer.head_dim) * storage.itemsize
