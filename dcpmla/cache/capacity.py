"""Capacity: how many tokens memory holds, in each format and under each DCP size."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch

from dcpmla.cache.compressed import AnyPlan, plan_compressed
from dcpmla.cache.latent import LatentCache
from dcpmla.compressed_config import CompressedConfig
from dcpmla.config import INDEX_CACHE_DTYPES, KV_CACHE_DTYPES, DCPConfig, MLAConfig

FORMATS = KV_CACHE_DTYPES[1:]  # "auto" is one of the others


@dataclass(frozen=True)
class ModelCaches:
    """The caches of a model in bfloat16, without their sizes.

    Attributes:
        config: of its attention.
        num_layers: that have a cache.
        num_index_layers: of sparse MLA, how many of them have an index cache; None for all.
    """

    config: MLAConfig | CompressedConfig
    num_layers: int
    num_index_layers: int | None = None

    def block(self, dcp: DCPConfig, num_states: int, num_drafts: int = 0) -> AnyPlan:
        """Return the sizes of a cache of one block, and of so many requests' states where it has states, which go back
        over so many rejected drafts.

        Raises:
            ValueError: options or a format that the model cannot have.
        """
        if isinstance(self.config, CompressedConfig):
            return plan_compressed(self.config, dcp, [1], torch.bfloat16, num_states, num_drafts)
        index_layers = None if self.num_index_layers is None else range(self.num_index_layers)
        return LatentCache.plan(self.config, dcp, self.num_layers, [1], torch.bfloat16, index_layers)

    def has_format(self, kv_cache_dtype: str) -> bool:
        """Return whether the model can have a format."""
        try:
            return self.block(DCPConfig(kv_cache_dtype=kv_cache_dtype), 1).bytes_per_rank > 0
        except ValueError:
            return False


def largest_cache(block: AnyPlan, gpu_bytes: int) -> AnyPlan:
    """Return a plan with as many blocks as fit into a rank's bytes besides its states."""
    room = gpu_bytes - replace(block, num_blocks=0).bytes_per_rank
    largest = replace(block, num_blocks=max(0, room) // max(1, block.bytes_per_block))
    while largest.num_blocks and largest.bytes_per_rank > gpu_bytes:  # small blocks share pages
        largest = replace(largest, num_blocks=largest.num_blocks - 1)
    return largest


def capacity_table(
    caches: ModelCaches, gpu_bytes: int, dcp_sizes: Sequence[int], num_states: int = 1, num_drafts: int = 0
) -> list[AnyPlan]:
    """Return the largest cache of a model for each format that it can have, and for each DCP size.

    Args:
        gpu_bytes: for the cache, on each GPU.
        num_states, num_drafts: of requests, where the caches have states. Each format of rows goes with each of the
            index cache.
    """
    formats = [name for name in FORMATS if caches.has_format(name)]
    index_formats = INDEX_CACHE_DTYPES[:1] if caches.config.indexer is None else INDEX_CACHE_DTYPES

    def largest(kv_cache_dtype: str, index_cache_dtype: str, dcp_size: int) -> AnyPlan:
        dcp = DCPConfig(
            tensor_parallel_size=dcp_size,
            decode_context_parallel_size=dcp_size,
            kv_cache_dtype=kv_cache_dtype,
            index_cache_dtype=index_cache_dtype,
        )
        return largest_cache(caches.block(dcp, num_states, num_drafts), gpu_bytes)

    return [largest(*setting) for setting in product(formats, index_formats, dcp_sizes)]
