"""The memory of attention, allocated once and freed, so that the peak that a cache is planned by includes it."""

import torch
from torch import Tensor

from dcpmla.attention.backends.calls import DETERMINISTIC_ROWS, PrefillCall, Segments
from dcpmla.attention.backends.choice import PREFILL_BACKENDS, select_backend
from dcpmla.attention.placement import Placement
from dcpmla.attention.select.selector import TokenSelector
from dcpmla.attention.step.metadata import PART_ROWS
from dcpmla.cache.formats import is_quantized, row_width
from dcpmla.config import MLAConfig


def touch_attention_memory(
    num_tokens: int,
    config: MLAConfig,
    placement: Placement,
    num_heads: int,
    num_dequantized: int,
    selector: TokenSelector | None,
) -> None:
    """Allocate and free the memory of attention in the largest step of num_tokens, one part after the other: an
    indexer's workspace, absorbed attention's, then the largest context chunk's and what its exchange keeps. Collective.

    Args:
        num_heads: Number of heads of this rank.
        num_dequantized: Maximum number of weights in fp8 that are dequantized at a time; 0 without such weights.
        selector: Selector of a layer with an indexer, else None.
    """
    dcp, cache_dtype, num_keys = placement.dcp, placement.cache_dtype, placement.dcp.context_workspace_tokens

    def new(*shape: int, dtype: torch.dtype = placement.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=placement.device)

    if selector is not None:
        new(selector.workspace_bytes(num_tokens, placement.dtype.itemsize), dtype=torch.uint8)
    num_rows = min(num_tokens * num_heads * dcp.decode_context_parallel_size, PART_ROWS)
    # Room for queries, absorbed and then gathered, and for outputs, before and in the exchange.
    outputs = [new(2 * num_rows, config.latent_dim + config.kv_lora_rank)]
    if dcp.deterministic:  # partial outputs, spare rows of programs among them, and outputs in float32
        num_partials = DETERMINISTIC_ROWS * 5 // 4 + 2 * num_rows
        outputs.append(new(num_partials, config.kv_lora_rank + 1, dtype=torch.float32))
    del outputs
    widths = config.qk_head_dim, config.qk_nope_head_dim, config.v_head_dim
    q, k_nope, v = (new(0, num_heads, width) for width in widths)
    rows = Segments((0, 0), new(0, dtype=torch.int32))
    k_pe, backend = new(0, config.qk_rope_head_dim), dcp.prefill_backend
    call = PrefillCall(q, k_nope, k_pe, v, *rows, *rows, config.softmax_scale, causal=False, backend=backend)
    joins_keys = select_backend(PREFILL_BACKENDS, call).joins_keys
    buffers = [
        new(num_keys, num_heads, config.qk_nope_head_dim + config.v_head_dim),
        new(num_dequantized),
        new(num_keys if joins_keys else 0, num_heads, config.qk_head_dim),
        new(num_keys if is_quantized(cache_dtype) else 0, config.latent_dim),
        new(0 if config.topk is None else num_tokens * num_keys // 8, dtype=torch.uint8),  # a mask
    ]
    width = row_width(cache_dtype, config.kv_lora_rank, config.qk_rope_head_dim)
    placement.exchange.reserve_context(num_keys, width, cache_dtype, torch.device(placement.device))
    del buffers  # after the exchange's memory, because the allocator's peak counts
