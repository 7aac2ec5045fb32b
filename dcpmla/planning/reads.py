"""Rows and keys that a decode step reads and multiplies, layer by layer: latents, or a window and entries."""

from collections import Counter
from dataclasses import dataclass
from math import prod

import torch

from dcpmla.attention.compressed.config import CompressedConfig
from dcpmla.cache.formats import row_width, storage_dtype
from dcpmla.cache.index_keys import index_row_width, index_storage_dtype
from dcpmla.cache.shared_rows import PAGE_ROWS, rows_shape
from dcpmla.config import IndexerConfig, MLAConfig


@dataclass(frozen=True)
class LayerReads:
    """The rows and keys that one new token reads in a layer's caches, on all ranks of a DCP group together.

    Attributes:
        num_layers: that read so much.
        num_rows: rows that the token attends to, its window's, entries or tokens.
        query_dim, out_dim: columns of queries and rows, and of partial outputs.
        num_keys: index keys that are scored, where there are more than are selected; else 0.
        num_candidates: of these, that a rank offers at most.
    """

    num_layers: int
    num_rows: int
    query_dim: int
    out_dim: int
    num_keys: int = 0
    num_candidates: int = 0


def layer_reads(
    attention: MLAConfig | CompressedConfig, num_layers: int, num_index_layers: int, context: int
) -> list[LayerReads]:
    """Return what the layers of a model read over a context, those that read alike together.

    Args:
        num_layers, num_index_layers: of an MLA model: with attention, and with an indexer of their own; the others of
            sparse MLA attend to the selection of the layer before.
    """
    if isinstance(attention, CompressedConfig):
        return [
            _compressed_reads(attention, ratio, has_indexer, number, context)
            for (ratio, has_indexer), number in Counter(attention.layer_kinds).items()
        ]
    widths = attention.latent_dim, attention.kv_lora_rank
    if attention.indexer is None or context <= attention.indexer.topk:
        return [LayerReads(num_layers, context, *widths)]
    topk = attention.indexer.topk
    return [
        LayerReads(num_index_layers, topk, *widths, num_keys=context, num_candidates=topk),
        LayerReads(num_layers - num_index_layers, topk, *widths),
    ]


def _compressed_reads(
    config: CompressedConfig, ratio: int, has_indexer: bool, num_layers: int, context: int
) -> LayerReads:
    window, widths = min(context, config.sliding_window), (config.head_dim, config.head_dim)
    num_entries, topk = context // ratio if ratio else 0, config.indexer.topk
    if not has_indexer or num_entries <= topk:
        return LayerReads(num_layers, window + num_entries, *widths)
    return LayerReads(num_layers, window + topk, *widths, num_keys=num_entries, num_candidates=topk)


def kv_row_bytes(attention: MLAConfig | CompressedConfig, kv_cache_dtype: str) -> int:
    """Return the bytes of a row of one layer's cache: of a token (`dcpmla.cache.formats`), or of a token of a window
    or an entry (`dcpmla.cache.shared_rows`), its share of the page's padding included.

    Raises:
        ValueError: a format that the rows cannot have.
    """
    storage = storage_dtype(kv_cache_dtype, torch.bfloat16)
    if isinstance(attention, CompressedConfig):
        return prod(rows_shape(PAGE_ROWS, attention.head_dim, storage)) * storage.itemsize // PAGE_ROWS
    return row_width(storage, attention.kv_lora_rank, attention.qk_rope_head_dim) * storage.itemsize


def index_row_bytes(indexer: IndexerConfig, index_cache_dtype: str) -> int:
    """Return the bytes of one key in one layer's index cache (`dcpmla.cache.index_keys`)."""
    storage = index_storage_dtype(index_cache_dtype, torch.bfloat16)
    return index_row_width(storage, indexer.head_dim) * storage.itemsize
