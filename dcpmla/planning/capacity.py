"""Capacity of a memory in tokens, in each format and under each DCP size."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import torch

from dcpmla.attention.stack import Stack
from dcpmla.cache.plan import CachePlan
from dcpmla.config import INDEX_CACHE_DTYPES, KV_CACHE_DTYPES, DCPConfig

FORMATS = KV_CACHE_DTYPES[1:]  # "auto" is one of the others


def block_of(attention: Stack, dcp: DCPConfig, num_states: int, num_drafts: int = 0) -> CachePlan:
    """Return the sizes of a cache of one block in bfloat16.

    Args:
        num_states: Number of requests' states, in a cache with states.
        num_drafts: Maximum drafts of a request in a step, over which a state can be rolled back.
    Raises:
        ValueError: Options or a format that the layers do not support.
    """
    return attention.plan_cache(dcp, [1], torch.bfloat16, num_states, num_drafts)


def has_format(attention: Stack, kv_cache_dtype: str) -> bool:
    """Return whether the caches of a model can have a format."""
    try:
        return block_of(attention, DCPConfig(kv_cache_dtype=kv_cache_dtype), 1).bytes_per_rank > 0
    except ValueError:
        return False


def largest_cache(block: CachePlan, gpu_bytes: int) -> CachePlan:
    """Return a plan with as many blocks as fit into a rank's bytes besides its states."""
    room = gpu_bytes - replace(block, num_blocks=0).bytes_per_rank
    largest = replace(block, num_blocks=max(0, room) // max(1, block.bytes_per_block))
    while largest.num_blocks and largest.bytes_per_rank > gpu_bytes:  # small blocks share pages
        largest = replace(largest, num_blocks=largest.num_blocks - 1)
    return largest


def capacity_table(
    attention: Stack,
    gpu_bytes: int,
    tp_size: int,
    dcp_sizes: Sequence[int],
    num_states: int = 1,
    num_drafts: int = 0,
) -> list[CachePlan]:
    """Return the largest cache of a model for each format of rows and of index keys, and each DCP size.

    Args:
        gpu_bytes: Bytes for the cache on each GPU.
        tp_size, dcp_sizes: Ranks of the TP group, and sizes of DCP groups, which divide it.
        num_states, num_drafts: Numbers of requests and drafts, in caches with states.
    """
    formats = [name for name in FORMATS if has_format(attention, name)]
    index_formats = INDEX_CACHE_DTYPES if attention.num_index_layers else INDEX_CACHE_DTYPES[:1]

    def largest(kv_cache_dtype: str, index_cache_dtype: str, dcp_size: int) -> CachePlan:
        dcp = DCPConfig(
            tensor_parallel_size=tp_size,
            decode_context_parallel_size=dcp_size,
            kv_cache_dtype=kv_cache_dtype,
            index_cache_dtype=index_cache_dtype,
        )
        return largest_cache(block_of(attention, dcp, num_states, num_drafts), gpu_bytes)

    return [largest(*setting) for setting in product(formats, index_formats, dcp_sizes)]
