"""The checks of `MLAAttention.attend`. Errors name the argument, its value and the allowed ones."""

import torch
from torch import Tensor

from dcpmla.attention.sparse.step import SparseMetadata
from dcpmla.attention.step import StepMetadata
from dcpmla.cache.latent import LayerCache
from dcpmla.config import DCPConfig, MLAConfig


def check_step(config: MLAConfig, hidden_states: Tensor, step: StepMetadata) -> None:
    """Raise ValueError for inputs that do not match the step, and for positions that do not match the model."""
    if not isinstance(step, StepMetadata):
        raise ValueError(f"step is {type(step).__name__}; expected what a StepBuilder gives")
    num_tokens, device = step.num_tokens, hidden_states.device
    if hidden_states.ndim != 2 or hidden_states.shape[1] != config.hidden_size or hidden_states.shape[0] < num_tokens:
        shape = tuple(hidden_states.shape)
        raise ValueError(f"hidden_states has shape {shape}; expected [at least {num_tokens}, {config.hidden_size}]")
    expected = torch.float32, (num_tokens, config.qk_rope_head_dim), device
    if _described(step.cos_sin) != (expected if config.use_rope else None):
        needed = f"{expected}, see with_positions" if config.use_rope else "None, for the model has no positions"
        raise ValueError(f"step.cos_sin is {_described(step.cos_sin)}; expected {needed}")
    scaled = None if config.llama_4_scaling is None else (hidden_states.dtype, (num_tokens,), device)
    if _described(step.query_factor) != scaled:
        raise ValueError(
            f"step.query_factor is {_described(step.query_factor)}; expected {scaled}, for config.llama_4_scaling is "
            f"{config.llama_4_scaling}"
        )


def check_cache(
    cache: LayerCache | None, step: StepMetadata, dcp: DCPConfig, dtype: torch.dtype, width: int
) -> LayerCache:
    """Return the cache, whose latents must have the step's blocks, of dcp.block_size rows of `width` elements of dtype.

    Raises:
        ValueError: The cache is missing, or does not match.
    """
    if not isinstance(cache, LayerCache):
        raise ValueError(
            f"cache is {type(cache).__name__}; expected a LayerCache, such as a LatentCache's cache[layer]"
        )
    kv_cache = cache.latents
    if kv_cache.ndim != 3 or kv_cache.shape[1:] != (dcp.block_size, width):
        raise ValueError(
            f"kv_cache has shape {tuple(kv_cache.shape)}; expected [num_blocks, {dcp.block_size}, {width}]"
        )
    if kv_cache.dtype != dtype:
        asked = f"kv_cache_dtype (--kv-cache-dtype) {dcp.kv_cache_dtype!r}"
        raise ValueError(f"kv_cache has dtype {kv_cache.dtype}; expected {dtype} for {asked}")
    if kv_cache.stride(-1) != 1:
        raise ValueError(f"kv_cache has strides {kv_cache.stride()}; the values of a row must be contiguous")
    step.check_blocks(kv_cache.shape[0])
    return cache


def check_selection(topk: int, kv_cache: Tensor, step: StepMetadata) -> None:
    """Raise ValueError if the step or the cache does not fit a layer of sparse MLA."""
    sparse = step.get(SparseMetadata)
    if sparse is None:
        raise ValueError(
            "step has no sparse part, which a layer with config.indexer needs; build it with a SparseStepBuilder"
        )
    if kv_cache.stride(0) != kv_cache.shape[1] * kv_cache.stride(1):
        raise ValueError(f"kv_cache has strides {kv_cache.stride()}; sparse attention takes contiguous blocks")
    if sparse.selection is None:
        if sparse.max_seq_len > topk:
            raise ValueError(
                f"the step has no selection; tokens with more than {topk} before them need with_selection(step, {topk})"
            )
    elif tuple(sparse.selection.positions.shape) != (step.num_tokens, topk):
        raise ValueError(
            f"the step's selection is {tuple(sparse.selection.positions.shape)}; expected "
            f"{(step.num_tokens, topk)}, tokens and topk"
        )


def _described(tensor: Tensor | None) -> tuple[torch.dtype, tuple[int, ...], torch.device] | None:
    return None if tensor is None else (tensor.dtype, tuple(tensor.shape), tensor.device)
