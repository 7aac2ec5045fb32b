"""Reads of DeepSeek-V4's layers in their caches, and the time of pieces of prompts in them."""

from collections import Counter
from collections.abc import Sequence
from math import inf, prod

import torch

from dcpmla.attention.compressed.config import CompressedConfig, LayerKind
from dcpmla.attention.costs import LayerReads, num_pairs, score_us
from dcpmla.attention.routes import Rates
from dcpmla.cache.formats import storage_dtype
from dcpmla.cache.shared_format import PAGE_ROWS, rows_shape
from dcpmla.config import DCPConfig

_GATHER_PASSES = 4  # two kernels read and write all gathered rows


class CompressedCosts:
    """Attention of all layers of DeepSeek-V4: a window and entries. Each piece gathers entries from all ranks, or moves
    its queries and outputs if they have fewer rows.

    Args:
        config: Geometry of the layers.
        dcp: Layout and format of the cache.
        rates: Speeds of the GPU.
    """

    tokens_per_request = 1

    def __init__(self, config: CompressedConfig, dcp: DCPConfig, rates: Rates) -> None:
        num_bytes, num_heads = row_bytes(config, dcp.kv_cache_dtype), config.heads_per_rank(dcp.tensor_parallel_size)
        # Each token lists the rows that it reads, so it shares none with its neighbours.
        read_us = num_bytes / rates.decode_gb_per_s / 1e3
        row_us = max(read_us, 4 * num_heads * config.head_dim / rates.decode_tflops / 1e6)
        link_us = (1 - 1 / dcp.decode_context_parallel_size) * num_bytes / rates.link_gb_per_s / 1e3
        gather_us = _GATHER_PASSES * num_bytes / rates.gb_per_s / 1e3 + link_us
        self._window, self._window_us = config.sliding_window, len(config.layer_kinds) * row_us
        num_moved = 2 * num_heads * dcp.decode_context_parallel_size  # rows of a token's queries and outputs
        # Of each kind with entries: tokens before its selection starts, tokens whose entries are as many rows as one
        # token moves, then times of a token's share of an entry.
        self._kinds = [
            (
                kind.ratio * config.indexer.topk if kind.selects else inf,
                kind.ratio * num_moved,
                number * gather_us / kind.ratio,
                number * row_us / kind.ratio,
                number * score_us(config.indexer, dcp, rates) / kind.ratio if kind.has_indexer else 0.0,
            )
            for kind, number in Counter(config.layer_kinds).items()
            if kind.ratio
        ]

    def piece_us(self, new: int, context: int) -> float:
        """Return the microseconds of all layers (`AttentionCosts.piece_us`)."""
        end = context + new
        time = self._window_us * num_pairs(new, context, self._window)
        for limit, num_moved, gather_us, row_us, key_us in self._kinds:
            # The time is no less than before the selection starts, so that longer pieces never take less time.
            time += gather_us * min(end, max(limit, num_moved * new)) + row_us * num_pairs(new, context, limit)
            if end > limit:
                time += key_us * num_pairs(new, context, inf)
        return time

    def choose_absorbed(self, pieces: Sequence[tuple[int, int]]) -> list[bool]:
        """Return False for each piece."""
        return [False] * len(pieces)

    def absorbs_all(self, pieces: Sequence[tuple[int, int]]) -> bool:
        """Return False."""
        return False


def layer_reads(config: CompressedConfig, context: int) -> list[LayerReads]:
    """Return the layers' reads over a context; layers with equal reads count together."""
    return [_reads(config, kind, number, context) for kind, number in Counter(config.layer_kinds).items()]


def _reads(config: CompressedConfig, kind: LayerKind, num_layers: int, context: int) -> LayerReads:
    window, widths = min(context, config.sliding_window), (config.head_dim, config.head_dim)
    num_entries, topk = context // kind.ratio if kind.ratio else 0, config.indexer.topk
    if not kind.selects or num_entries <= topk:
        return LayerReads(num_layers, window + num_entries, *widths)
    if not kind.has_indexer:
        return LayerReads(num_layers, window + topk, *widths)
    return LayerReads(num_layers, window + topk, *widths, num_keys=num_entries, num_candidates=topk)


def row_bytes(config: CompressedConfig, kv_cache_dtype: str) -> int:
    """Return the bytes of a row of one layer's cache, its share of the page's padding included.

    Raises:
        ValueError: The rows cannot have the format.
    """
    storage = storage_dtype(kv_cache_dtype, torch.bfloat16)
    return prod(rows_shape(PAGE_ROWS, config.head_dim, storage)) * storage.itemsize // PAGE_ROWS
