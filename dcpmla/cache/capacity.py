"""Capacity: how many tokens memory holds, in each format and under each DCP size."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import torch

from dcpmla.cache.formats import TILE
from dcpmla.cache.latent import CachePlan, LatentCache
from dcpmla.config import INDEX_CACHE_DTYPES, KV_CACHE_DTYPES, DCPConfig, MLAConfig

FORMATS = KV_CACHE_DTYPES[1:]  # "auto" is one of the others


def capacity_table(
    config: MLAConfig, num_layers: int, gpu_bytes: int, dcp_sizes: Sequence[int], num_index_layers: int | None = None
) -> list[CachePlan]:
    """Return the largest cache of a model in bfloat16 for each format that it can have, and for each DCP size.

    Args:
        gpu_bytes: for the cache, on each GPU.
        num_index_layers: of sparse MLA, how many layers have an index cache; None for all. Each format of the latent
            cache goes with each of the index cache.
    """
    formats = [name for name in FORMATS if name != "fp8_ds_mla" or config.kv_lora_rank % TILE == 0]
    index_formats = INDEX_CACHE_DTYPES[:1] if config.indexer is None else INDEX_CACHE_DTYPES

    def largest(kv_cache_dtype: str, index_cache_dtype: str, dcp_size: int) -> CachePlan:
        dcp = DCPConfig(
            tensor_parallel_size=dcp_size,
            decode_context_parallel_size=dcp_size,
            kv_cache_dtype=kv_cache_dtype,
            index_cache_dtype=index_cache_dtype,
        )
        index_layers = None if num_index_layers is None else range(num_index_layers)
        block = LatentCache.plan(config, dcp, num_layers, [1], torch.bfloat16, index_layers)
        return replace(block, num_blocks=gpu_bytes // block.bytes_per_rank)

    return [largest(*setting) for setting in product(formats, index_formats, dcp_sizes)]
