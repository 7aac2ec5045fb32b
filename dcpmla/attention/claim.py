"""The memory of MHA over cached contexts, claimed before a cache's size is planned."""

import torch
from torch import Tensor

from dcpmla.attention.backends import PREFILL_BACKENDS, select_backend
from dcpmla.attention.calls import PrefillCall, Segments
from dcpmla.attention.placement import Placement
from dcpmla.cache.formats import is_quantized, row_width
from dcpmla.config import MLAConfig


def claim_context(num_tokens: int, config: MLAConfig, placement: Placement, num_heads: int, num_weights: int) -> None:
    """Allocate and free the memory of the largest context chunk in a step of num_tokens, and the memory that its
    exchange keeps. Collective.

    Args:
        num_heads: Number of heads of this rank.
        num_weights: Number of elements of an up-projection in fp8, which is dequantized; 0 for other dtypes.
    """
    dcp, cache_dtype, num_keys = placement.dcp, placement.cache_dtype, placement.dcp.context_workspace_tokens

    def new(*shape: int, dtype: torch.dtype = placement.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=placement.device)

    widths = config.qk_head_dim, config.qk_nope_head_dim, config.v_head_dim
    q, k_nope, v = (new(0, num_heads, width) for width in widths)
    rows = Segments((0, 0), new(0, dtype=torch.int32))
    k_pe, backend = new(0, config.qk_rope_head_dim), dcp.prefill_backend
    call = PrefillCall(q, k_nope, k_pe, v, *rows, *rows, config.scale, causal=False, backend=backend)
    joins_keys = select_backend(PREFILL_BACKENDS, call).joins_keys
    buffers = [
        new(num_keys, num_heads, config.qk_nope_head_dim + config.v_head_dim),
        new(num_weights),
        new(num_keys if joins_keys else 0, num_heads, config.qk_head_dim),
        new(num_keys if is_quantized(cache_dtype) else 0, config.latent_dim),
        new(0 if config.indexer is None else num_tokens * num_keys // 8, dtype=torch.uint8),  # a mask
    ]
    width = row_width(cache_dtype, config.kv_lora_rank, config.qk_rope_head_dim)
    placement.exchange.reserve_context(num_keys, width, cache_dtype, torch.device(placement.device))
    del buffers  # after the exchange's memory, because the allocator's peak counts
