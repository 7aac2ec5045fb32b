"""Checks of a step and of a cache that a layer of DeepSeek-V4's attention gets."""

import torch
from torch import Tensor

from dcpmla.attention.layers.compressed.cache import CompressedLayerCache, CompressedPlan
from dcpmla.attention.layers.compressed.step import CompressedMetadata
from dcpmla.attention.step.metadata import StepMetadata


def check_step(hidden_states: Tensor, step: StepMetadata, width: int) -> CompressedMetadata:
    """Return the step's part for this attention.

    Raises:
        ValueError: The step has no such part, or hidden states [T, width] do not match it.
    """
    compressed = step.get(CompressedMetadata)
    if compressed is None:
        raise ValueError("step has no compressed part; call with_angles of dcpmla.attention.layers.compressed.step")
    if hidden_states.ndim != 2 or hidden_states.shape[0] < step.num_tokens or hidden_states.shape[1] != width:
        shape = tuple(hidden_states.shape)
        raise ValueError(f"hidden_states has shape {shape}; expected [at least {step.num_tokens}, {width}]")
    return compressed


def check_cache(
    cache: CompressedLayerCache | None, plan: CompressedPlan, ratio: int, dtype: torch.dtype
) -> CompressedLayerCache:
    """Return the cache of a layer with a ratio, which was made for rows of a dtype.

    Raises:
        ValueError: It is no such cache, or its rows are not the plan's or the layer's.
    """
    if not isinstance(cache, CompressedLayerCache):
        raise ValueError(
            f"cache is {type(cache).__name__}; expected a CompressedLayerCache, such as a CompressedCache's "
            "cache[layer]"
        )
    expected = plan.rows_shape(ratio), plan.dtype
    if (tuple(cache.rows.shape), cache.rows.dtype) != expected or plan.dtype != dtype:
        raise ValueError(
            f"cache.rows has shape {tuple(cache.rows.shape)} and dtype {cache.rows.dtype}; expected {expected} for "
            f"kv_cache_dtype (--kv-cache-dtype) {plan.dcp.kv_cache_dtype!r}"
        )
    return cache
