"""The modelled time of pieces of prompts in DeepSeek-V4's layers, and the bytes of a row that they read."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, prod

import torch

from dcpmla.attention.costs import Rates, num_pairs, score_us
from dcpmla.attention.layers.compressed.config import CompressedConfig, LayerKind
from dcpmla.cache.formats import storage_dtype
from dcpmla.cache.shared_format import PAGE_ROWS, rows_shape
from dcpmla.config import DCPConfig

_GATHER_PASSES = 4  # two kernels read and write all gathered rows


@dataclass(frozen=True)
class CompressedCosts:
    """The time of one layer of DeepSeek-V4: a window and entries. Each piece gathers entries from all ranks, or moves
    its queries and outputs if they have fewer rows.

    Args:
        config: Geometry of the layers.
        kind: Entries of the layer.
        dcp: Layout and format of the cache.
        rates: Speeds of the GPU.
    """

    config: CompressedConfig
    kind: LayerKind
    dcp: DCPConfig
    rates: Rates

    tokens_per_request = 1

    def piece_us(self, new: int, context: int) -> float:
        """Return the microseconds of a piece (`LayerCosts.piece_us`)."""
        config, ratio, end = self.config, self.kind.ratio, context + new
        time = self._row_us * num_pairs(new, context, config.sliding_window)
        if not ratio:
            return time
        limit = ratio * config.indexer.topk if self.kind.selects else inf  # tokens before the selection starts
        num_moved = 2 * self._num_heads * self.dcp.decode_context_parallel_size  # rows of a token's queries and outputs
        # The time is no less than before the selection starts, so that longer pieces never take less time.
        time += self._gather_us / ratio * min(end, max(limit, ratio * num_moved * new))
        time += self._row_us / ratio * num_pairs(new, context, limit)
        if end > limit and self.kind.has_indexer:
            time += score_us(config.indexer, self.dcp, self.rates) / ratio * num_pairs(new, context, inf)
        return time

    def lost_us(self, pieces: Sequence[tuple[int, int]]) -> list[float]:
        """Return infinities, because the layer does not absorb queries."""
        return [inf] * len(pieces)

    @cached_property
    def _num_heads(self) -> int:
        return self.config.heads_per_rank(self.dcp.tensor_parallel_size)

    @cached_property
    def _row_us(self) -> float:
        """Return the microseconds of a row that a token reads; tokens list their rows, and share none."""
        read_us = row_bytes(self.config, self.dcp.kv_cache_dtype) / self.rates.decode_gb_per_s / 1e3
        return max(read_us, 4 * self._num_heads * self.config.head_dim / self.rates.decode_tflops / 1e6)

    @cached_property
    def _gather_us(self) -> float:
        """Return the microseconds of a gathered row."""
        num_bytes = row_bytes(self.config, self.dcp.kv_cache_dtype)
        link_us = (1 - 1 / self.dcp.decode_context_parallel_size) * num_bytes / self.rates.link_gb_per_s / 1e3
        return _GATHER_PASSES * num_bytes / self.rates.gb_per_s / 1e3 + link_us


def row_bytes(config: CompressedConfig, kv_cache_dtype: str) -> int:
    """Return the bytes of a row of one layer's cache, its share of the page's padding included.

    Raises:
        ValueError: The rows cannot have the format.
    """
    storage = storage_dtype(kv_cache_dtype, torch.bfloat16)
    return prod(rows_shape(PAGE_ROWS, config.head_dim, storage)) * storage.itemsize // PAGE_ROWS
