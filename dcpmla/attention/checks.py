"""What `MLAAttention.attend` refuses: ValueErrors that name the argument, what it is, and what it must be."""

import torch
from torch import Tensor

from dcpmla.attention.sparse.metadata import SelectedTokens
from dcpmla.attention.step import StepMetadata
from dcpmla.config import DCPConfig, MLAConfig


def check_step(
    config: MLAConfig,
    hidden_states: Tensor,
    metadata: StepMetadata,
    cos_sin: Tensor | None,
    query_factor: Tensor | None,
) -> None:
    """Raise ValueError for inputs whose shapes are not those of the step."""
    num_tokens = metadata.num_tokens
    if hidden_states.ndim != 2 or hidden_states.shape[1] != config.hidden_size or hidden_states.shape[0] < num_tokens:
        shape = tuple(hidden_states.shape)
        raise ValueError(f"hidden_states has shape {shape}; expected [at least {num_tokens}, {config.hidden_size}]")
    if cos_sin is not None and tuple(cos_sin.shape) != (num_tokens, config.qk_rope_head_dim):
        raise ValueError(
            f"cos_sin has shape {tuple(cos_sin.shape)}; expected [{num_tokens}, {config.qk_rope_head_dim}]"
        )
    given = None if query_factor is None else (query_factor.dtype, tuple(query_factor.shape))
    wanted = None if config.llama_4_scaling is None else (hidden_states.dtype, (num_tokens,))
    if given != wanted:
        raise ValueError(
            f"query_factor is {given}; expected {wanted}, for config.llama_4_scaling is {config.llama_4_scaling}"
        )


def check_cache(kv_cache: Tensor, dcp: DCPConfig, dtype: torch.dtype, width: int) -> None:
    """Raise ValueError unless kv_cache has blocks of dcp.block_size rows of `width` elements of dtype."""
    if kv_cache.ndim != 3 or kv_cache.shape[1:] != (dcp.block_size, width):
        raise ValueError(
            f"kv_cache has shape {tuple(kv_cache.shape)}; expected [num_blocks, {dcp.block_size}, {width}]"
        )
    if kv_cache.dtype != dtype:
        asked = f"kv_cache_dtype (--kv-cache-dtype) {dcp.kv_cache_dtype!r}"
        raise ValueError(f"kv_cache has dtype {kv_cache.dtype}; expected {dtype} for {asked}")
    if kv_cache.stride(-1) != 1:
        raise ValueError(f"kv_cache has strides {kv_cache.stride()}; the values of a row must lie side by side")


def check_selection(
    topk: int, has_indexer: bool, kv_cache: Tensor, metadata: StepMetadata, selection: SelectedTokens | None
) -> None:
    """Raise ValueError for what a layer of sparse MLA cannot select with, or attend by."""
    if metadata.sparse is None:
        raise ValueError(
            "metadata has no sparse part, which a layer with config.indexer needs; build it with is_sparse"
        )
    if kv_cache.stride(0) != kv_cache.shape[1] * kv_cache.stride(1):
        raise ValueError(
            f"kv_cache has strides {kv_cache.stride()}; sparse attention takes blocks that lie one behind the other"
        )
    if selection is None and not has_indexer and metadata.sparse.max_seq_len > topk:
        raise ValueError("selection is None; a layer with skip_topk needs what a layer before it selected")
    if selection is not None and tuple(selection.positions.shape) != (metadata.num_tokens, topk):
        raise ValueError(
            f"selection is of {tuple(selection.positions.shape)}; expected {(metadata.num_tokens, topk)}, tokens and topk"
        )
